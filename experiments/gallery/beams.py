"""Beam search: what a width costs, and what its hypotheses have in common."""

from __future__ import annotations

from experiments import theme
from experiments.gallery.entry import GPU, Entry, run, traffic

WIDTHS = (1, 2, 4, 8)
PROMPT, ANSWER = 1000, 200
PAGE, COARSE = 16, 64


def beam_search() -> Entry:
    """Time and pages of one search at a time, over its width."""
    lengths = {
        "random_input_len": PROMPT,
        "random_output_len": ANSWER,
        "max_concurrency": 1,
        "num_prompts": 12,
    }
    _, plain = run(traffic(**lengths))
    found = [run(traffic(beam_width=width, **lengths)) for width in WIDTHS]
    seconds = [summary.e2el.mean_s for _, summary in found]
    pages = [int(record.steps.used_pages.max()) for record, _ in found]
    prompt, path = PROMPT // PAGE, -(-(PROMPT + ANSWER) // PAGE)
    apart = [prompt + width * (path - prompt) for width in WIDTHS]
    fig = theme.beside(2, height=340)
    fig.add_scatter(x=WIDTHS, y=seconds, name="beam search", mode="lines+markers", row=1, col=1)
    fig.add_scatter(
        x=WIDTHS,
        y=[plain.e2el.mean_s] * len(WIDTHS),
        name="one answer, sampled",
        mode="lines",
        line={"dash": "dot"},
        row=1,
        col=1,
    )
    fig.add_scatter(x=WIDTHS, y=pages, name="hypotheses", mode="lines+markers", row=1, col=2)
    fig.add_scatter(
        x=WIDTHS,
        y=apart,
        name="answers that share the prompt",
        mode="lines",
        line={"dash": "dot"},
        row=1,
        col=2,
    )
    fig.update_xaxes(type="log", tickvals=WIDTHS).update_yaxes(rangemode="tozero")
    fig.update_xaxes(title_text="width: seconds to the answer", col=1)
    fig.update_xaxes(title_text="width: KV pages at most", col=2)
    fig.update_yaxes(matches=None, showticklabels=True)
    beams = found[-1][0].beams
    assert beams is not None
    widest = traffic(beam_width=WIDTHS[-1], **lengths)
    coarse, coarser = run(widest, block_size=COARSE)
    assert coarse.beams is not None
    again, much = (b.computed_tokens / b.shown_tokens for b in (beams, coarse.beams))
    return Entry(
        "beam_search",
        "Beam search: width against time and pages",
        "--beam-width; use_beam_search and n in a request to serve",
        f"Each hypothesis of each step is a request of one token, and nothing is shown before the end. On an "
        f"{GPU.upper()} an answer of {ANSWER} tokens to {PROMPT:,} is there after {plain.e2el.mean_s:.2f} s when it is "
        f"sampled, and begins after {plain.ttft.mean_s * 1e3:.0f} ms; a search takes {seconds[0]:.2f} s with one "
        f"hypothesis and {seconds[-1]:.2f} s with {WIDTHS[-1]}, which one step carries together. They hold "
        f"{pages[-1]} pages where as many answers that share the prompt would hold {apart[-1]}, for they agree on all "
        f"but their last tokens. The price is the last, partly filled page, which each computes again: {again:.0f} "
        f"tokens for one that is shown. With pages of {COARSE} instead of {PAGE} tokens it is {much:.0f}, and "
        f"{coarser.e2el.mean_s:.2f} s.",
        fig,
    )
