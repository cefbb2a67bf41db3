"""Layouts of other projects and our own: made-up tables that follow a formula come back as that formula."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from calibration import bench_table
from calibration.assemble import fit_profile
from calibration.fit import Options
from calibration.sources import is_of_device, read_sources, version_key
from costmodel.datasheet import device_facts, facts_of
from costmodel.formats import hardware
from costmodel.kernels import FORMULAS
from costmodel.model import load_model
from costmodel.predict import Kernel
from costmodel.profile import DeviceProfile, KernelKind
from serving.errors import UsageError

QUICK = Options(folds=0, max_evaluations=12)
A100 = device_facts("a100")
HW = hardware(A100)
TRUTH: dict[str, dict[str, float]] = {
    kind: {name: value * (1.05 if name.endswith("_s") else 1.0) for name, value in defaults.items()}
    for kind, (_, defaults, _, _) in FORMULAS.items()
}
"""A made-up A100: the formulas with launches 5 % slower than their defaults."""

HEADS = ((32, 8), (16, 4), (8, 8))
SIZES = (1024, 4096, 14336)
TOKENS = (1, 16, 64, 256, 1024, 4096)


def truth_s(kind: str, *axes: float) -> float:
    return float(FORMULAS[kind][0](TRUTH[kind], HW, *(np.asarray(float(a)) for a in axes)))


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """CSV or Parquet, by suffix."""
    found = [dict(row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(found), path)
        return path
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)
    return path


def agrees(profile: DeviceProfile, kind: KernelKind, shape: tuple[float, ...], *grid: float) -> None:
    """The profile says at this point what the formula said."""
    group = getattr(profile, kind)
    fit = group["bfloat16"] if isinstance(group, dict) else group
    assert fit is not None, kind
    found = float(Kernel(kind, fit, HW).seconds(shape, *grid))
    assert found == pytest.approx(truth_s(kind, *shape, *grid), rel=2e-3), (kind, shape, grid)


# -- AIConfigurator ------------------------------------------------------------------------------------------


def aic_tree(root: Path, suffix: str = ".parquet") -> Path:
    """`systems/data/<gpu>/<family>/<engine>/<version>/…`: the A100's numbers are the truth, the rest is bait."""
    first = {"framework": "VLLM", "version": "0.24.0", "device": "A100", "kernel_source": "k"}
    data = root / "systems" / "data"
    gemm = [
        {**first, "op_name": "gemm", "gemm_dtype": "float16", "m": m, "n": n, "k": k}
        | {"latency": truth_s("gemm", n, k, m) * 1e3}
        for n, k, m in itertools.product(SIZES, SIZES, TOKENS)
    ]
    attention = {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "beam_width": 1, "window_size": 0}
    context = [
        {**first, **attention, "op_name": "context_attention", "step": 0}
        | {"batch_size": b, "isl": t, "num_heads": h, "num_key_value_heads": k, "head_dim": 128}
        | {"latency": truth_s("prefill", h, k, b, t, 0) * 1e3}
        for (h, k), b, t in itertools.product(HEADS, (1, 4), (64, 512, 4096))
    ]
    generation = [
        {**first, **attention, "op_name": "generation_attention", "isl": 1, "step": c - 1}
        | {"batch_size": b, "num_heads": h, "num_key_value_heads": k, "head_dim": 128}
        | {"latency": truth_s("decode", h, k, b, c) * 1e3}
        for (h, k), b, c in itertools.product(HEADS, (1, 16, 128), (1024, 8192))
    ]
    generation.append({**generation[0], "window_size": 128})
    generation.append({**generation[0], "head_dim": 64})
    comm = [
        {**first, "op_name": "all_reduce", "allreduce_dtype": "bfloat16", "num_gpus": g}
        | {"kernel_source": "vLLM_custom_graph", "message_size": size // 2}
        | {"latency": truth_s("all_reduce", g, size) * 1e3}
        for g, size in itertools.product((2, 4, 8), (1024, 65536, 2**20, 2**24))
    ]
    bait = [{**row, "latency": row["latency"] * 9} for row in gemm]
    write(data / "a100_sxm" / "gemm" / "vllm" / "0.24.0" / f"gemm_perf{suffix}", gemm)
    write(data / "a100_sxm" / "gemm" / "vllm" / "0.9.1" / f"gemm_perf{suffix}", bait)
    write(data / "a100_sxm" / "gemm" / "sglang" / "0.5.14" / f"gemm_perf{suffix}", bait)
    write(data / "h200_sxm" / "gemm" / "vllm" / "0.25.0" / f"gemm_perf{suffix}", bait)
    write(data / "a100_pcie" / "gemm" / "vllm" / "0.25.0" / f"gemm_perf{suffix}", bait)
    where = data / "a100_sxm" / "attention" / "vllm" / "0.24.0"
    write(where / f"context_attention_perf{suffix}", context)
    write(where / f"generation_attention_perf{suffix}", generation)
    write(where.parent / "0.24.0" / f"mla_bmm_perf{suffix}", [{"a": 1}])
    write(data / "a100_sxm" / "comm" / "vllm" / "0.14.0" / f"custom_allreduce_perf{suffix}", comm)
    return root


@pytest.mark.parametrize("suffix", [".parquet", ".txt"])
def test_an_aiconfigurator_tree_gives_the_device_and_engine_asked_for(tmp_path: Path, suffix: str) -> None:
    said: list[str] = []
    profile = fit_profile([aic_tree(tmp_path, suffix)], "a100", options=QUICK, progress=said.append)
    agrees(profile, "gemm", (4096, 14336), 64)
    agrees(profile, "prefill", (32, 8), 4, 512, 0)
    agrees(profile, "decode", (16, 4), 16, 8192)
    agrees(profile, "all_reduce", (4,), 65536)
    assert profile.decode["bfloat16"].cleaning == {"head size other than 128": 1}
    assert any("1 rows left out (sliding window)" in note for note in profile.provenance.notes)
    assert any("2 files of other devices" in line for line in said)
    assert any("3 tables of other engines, older versions or kernels not modelled" in line for line in said)


def test_an_engine_that_a_tree_lacks_is_named_with_those_it_has(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no tables of engine 'trtllm'; it has sglang, vllm"):
        read_sources([aic_tree(tmp_path)], "a100", "trtllm")
    with pytest.raises(UsageError, match="other devices only, none of l40s"):
        read_sources([tmp_path], "l40s")


def test_the_kernel_timed_most_often_stands_for_a_problem_with_several(tmp_path: Path) -> None:
    row = {"gemm_dtype": "fp8", "m": 1, "n": 512, "k": 512, "latency": 0.01, "kernel_source": "usual"}
    odd = {**row, "kernel_source": "odd", "latency": 0.02}
    file = write(tmp_path / "gemm_perf.csv", [row, {**row, "m": 2}, odd, {**row, "gemm_dtype": "fp7"}])
    (table,) = read_sources([file], "h200").tables
    assert [r["latency_us"] for r in table.rows] == ["10.0", "10.0"]
    assert table.dropped == {"another kernel was timed on the same problem": 1, "number format fp7": 1}


def test_versions_are_ordered_as_releases_are() -> None:
    versions = ["1.10.0", "1.3.0.post1", "1.3.0", "1.3.0rc20", "1.3.0rc3", "0.24.0", "0.9.2"]
    assert sorted(versions, key=version_key, reverse=True) == versions


def test_folders_that_name_a_device_are_told_from_others() -> None:
    assert is_of_device(("systems", "h200_sxm", "tp1"), "h200")
    assert is_of_device(("RTXPRO6000", "meta-llama"), "rtxpro6000")
    assert is_of_device(("network", "a100_pairwise_nvlink"), "a100")
    assert not is_of_device(("h200_sxm",), "h20")
    assert not is_of_device(("gb200",), "b200")
    assert not is_of_device(("h100_pcie",), "h100")


# -- LLMServingSim -------------------------------------------------------------------------------------------


def lss_tables(folder: Path, old: bool = False) -> Path:
    """Llama-3.1-8B on two ranks, as layers: the layout of 2026, or that of 2025 with one product a row."""
    model = load_model("llama-3.1-8b")
    (qkv, o), (gate_up, down) = model.attention_gemms(2), model.mlp_gemms(2)
    sizes = {"qkv_proj": (qkv.n, qkv.k), "gate_up_proj": (gate_up.n, gate_up.k)}
    if old:
        sizes = {"q_proj": (2048, 4096), "k_proj": (512, 4096), "gate_proj": (7168, 4096)}
    sizes |= {"o_proj": (o.n, o.k), "down_proj": (down.n, down.k)}
    layers = [
        (name, m, truth_s("gemm", n, k, m)) for (name, (n, k)), m in itertools.product(sizes.items(), TOKENS)
    ]
    layers += [("act_fn", m, truth_s("elementwise", 7168 * 6, m)) for m in TOKENS]
    layers += [("something_new", 1, 1.0)]
    if old:
        where = folder / "A100" / "meta-llama" / "Llama-3.1-8B" / "tp2"
        rows = [
            {"layer_name": n, "input": m, "kv_cache": 0, "tp_size": 2, "latency(ns)": s * 1e9}
            for n, m, s in layers
        ]
        write(where / "layers.csv", rows)
        return folder
    where = folder / "A100" / "meta-llama" / "Llama-3.1-8B" / "bf16" / "tp2"
    write(where / "dense.csv", [{"layer": n, "tokens": m, "time_us": s * 1e6} for n, m, s in layers])
    attention = [
        (t, c, 0, 0, truth_s("prefill", 16, 4, 1, t, c)) for t in (64, 512, 2048) for c in (0, 1024, 8192)
    ]
    attention += [(0, 0, b, c, truth_s("decode", 16, 4, b, c)) for b in (1, 8, 64) for c in (512, 4096)]
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    rows = [dict(zip(names, (*row[:4], row[4] * 1e6), strict=True)) for row in attention]
    write(where / "attention.csv", rows)
    write(where / "skew_fit.csv", [{"whatever": 1}])
    (where.parent / "meta.yaml").write_text("model: meta-llama/Llama-3.1-8B\nvariant: bf16\n")
    return folder


def test_an_llmservingsim_folder_says_by_itself_which_model_it_is_of(tmp_path: Path) -> None:
    profile = fit_profile([lss_tables(tmp_path)], "a100", options=QUICK)
    agrees(profile, "gemm", (14336, 4096), 256)
    agrees(profile, "elementwise", (7168 * 6,), 1024)
    agrees(profile, "prefill", (16, 4), 1, 512, 8192)
    agrees(profile, "decode", (16, 4), 64, 4096)


def test_llmservingsims_layout_of_2025_is_read_too(tmp_path: Path) -> None:
    profile = fit_profile([lss_tables(tmp_path, old=True)], "a100", options=QUICK)
    agrees(profile, "gemm", (512, 4096), 256)
    agrees(profile, "gemm", (7168, 4096), 16)


def test_layers_whose_model_nobody_names_are_refused(tmp_path: Path) -> None:
    rows = [{"layer": "o_proj", "tokens": 1, "time_us": 5}]
    with pytest.raises(UsageError, match="a layer profile lies in a folder tp<N>"):
        fit_profile([write(tmp_path / "dense.csv", rows)], "a100")
    with pytest.raises(UsageError, match=r"dense\.csv: --model 'nobody'"):
        fit_profile([write(tmp_path / "nobody" / "tp1" / "dense.csv", rows)], "a100")
    with pytest.raises(UsageError, match="variant 'fp8' is not read"):
        fit_profile([write(tmp_path / "llama-3.1-8b" / "fp8" / "tp1" / "dense.csv", rows)], "a100")


# -- Vidur ---------------------------------------------------------------------------------------------------


def vidur_folder(root: Path) -> Path:
    """`compute/<gpu>/<organisation>/<model>/{mlp,attention}.csv`, `network/<node>/all_reduce.csv`; milliseconds."""
    model = root / "compute" / "a100" / "meta-llama" / "Meta-Llama-3-8B"
    shape = {"n_head": 32, "n_kv_head": 8, "n_embd": 4096, "n_expanded_embd": 14336, "use_gated_mlp": True}
    mlp = []
    for tp, m in itertools.product((1, 2), TOKENS):
        products = {"attn_pre_proj": (6144 // tp, 4096), "attn_post_proj": (4096, 4096 // tp)}
        products |= {"mlp_up_proj": (28672 // tp, 4096), "mlp_down_proj": (4096, 14336 // tp)}
        times = {
            f"time_stats.{name}.median": truth_s("gemm", n, k, m) * 1e3 for name, (n, k) in products.items()
        }
        times |= {"time_stats.mlp_act.median": truth_s("elementwise", 14336 // tp * 6, m) * 1e3}
        mlp.append({**times, **shape, "vocab_size": 1, "num_tokens": m, "num_tensor_parallel_workers": tp})
    write(model / "mlp.csv", mlp)
    attention = []
    for tp, b, c in itertools.product((1, 2), (1, 16, 128), (1023, 8191)):
        attention.append((tp, b, 0, c, False, truth_s("decode", 32 // tp, 8 // tp, b, c + 1)))
    for tp, t, c in itertools.product((1, 2), (64, 512, 2048), (0, 1024)):
        attention.append((tp, 1, t, c, True, truth_s("prefill", 32 // tp, 8 // tp, 1, t, c)))
    write(
        model / "attention.csv",
        [
            {
                "n_embd": 4096,
                "n_q_head": 32,
                "n_kv_head": 8,
                "num_tensor_parallel_workers": tp,
                "batch_size": b,
            }
            | {"prefill_chunk_size": t, "kv_cache_size": c, "is_prefill": is_prefill}
            | {"time_stats.attn_prefill.median": s * 1e3 if is_prefill else ""}
            | {"time_stats.attn_decode.median": "" if is_prefill else s * 1e3}
            for tp, b, t, c, is_prefill, s in attention
        ],
    )
    write(
        root / "network" / "a100_dgx" / "all_reduce.csv",
        [
            {
                "time_stats.all_reduce.median": truth_s("all_reduce", g, size) * 1e3,
                "rank": 0,
                "num_workers": g,
            }
            | {"size": size, "collective": "all_reduce"}
            for g, size in itertools.product((2, 4), range(4096, 4096 * 301, 4096))
        ],
    )
    return root


def test_a_vidur_folder_round_trips_and_dense_sweeps_are_thinned(tmp_path: Path) -> None:
    profile = fit_profile([vidur_folder(tmp_path)], "a100", options=QUICK)
    agrees(profile, "gemm", (28672, 4096), 1024)
    agrees(profile, "gemm", (4096, 7168), 16)
    agrees(profile, "elementwise", (14336 * 6,), 4096)
    agrees(profile, "prefill", (16, 4), 1, 512, 1024)
    agrees(profile, "decode", (32, 8), 128, 8192)
    agrees(profile, "all_reduce", (4,), 4096)
    assert profile.all_reduce is not None
    assert profile.all_reduce.num_points <= 2 * 160
    assert profile.all_reduce.cleaning["between kept sizes of a dense sweep"] >= 2 * 140


# -- our own microbenchmarks ---------------------------------------------------------------------------------


def bench_rows() -> list[dict[str, Any]]:
    """Every kind of kernel, three problems along each axis at most."""
    points: dict[str, Iterable[tuple[float, ...]]] = {
        "gemm": itertools.product(SIZES, SIZES, TOKENS),
        "prefill": ((*h, 1, t, c) for h in HEADS for t in (64, 1024) for c in (0, 4096)),
        "decode": ((*h, b, c) for h in HEADS for b in (1, 32) for c in (256, 4096)),
        "decode_mixed": ((*h, b, c) for h in HEADS for b in (1, 32) for c in (256, 4096)),
        "all_reduce": itertools.product((2, 8), (4096, 2**20, 2**25)),
        "moe": itertools.product((2048,), (768,), (8, 512, 8192), (8, 64, 128)),
        "elementwise": itertools.product((8192, 32768), TOKENS),
        "sampler": itertools.product((128256,), (1, 16, 256)),
    }
    return [
        {"kind": kind, "dtype": "bfloat16", **dict(zip(bench_table.AXES[kind], point, strict=True))}
        | {"latency_s": truth_s(kind, *point), "repeats": 5, "noise": 0.0123}
        for kind, some in points.items()
        for point in some
    ]


@pytest.mark.parametrize("name", ["bench.csv", "bench.parquet"])
def test_our_own_microbenchmarks_round_trip_for_every_kernel(tmp_path: Path, name: str) -> None:
    rows = bench_rows()
    bench_table.write(tmp_path / name, rows)
    profile = fit_profile([tmp_path / name], "a100", options=QUICK)
    assert {kernel.split("/")[0] for kernel, _ in profile.kernels()} == set(FORMULAS)
    for row in rows[:: max(1, len(rows) // 40)]:
        _, _, shape, grid = FORMULAS[row["kind"]]
        agrees(profile, row["kind"], tuple(row[a] for a in shape), *(row[a] for a in grid))
    assert all(fit.noise_log_std == 0.0123 for _, fit in profile.kernels())


def test_a_head_size_of_its_own_is_fitted_as_such(tmp_path: Path) -> None:
    hw = hardware(A100, head_dim=64)
    rows = [
        {"kind": "decode", "dtype": "", "heads": 9, "kv_heads": 3, "batch": b, "context": c, "head_dim": 64}
        | {"latency_s": float(FORMULAS["decode"][0](TRUTH["decode"], hw, *map(np.asarray, (9.0, 3.0, b, c))))}
        for b, c in itertools.product((1.0, 16.0, 128.0), (256.0, 4096.0, 16384.0))
    ]
    bench_table.write(tmp_path / "b.csv", rows)
    fit = fit_profile([tmp_path / "b.csv"], "a100", options=QUICK).decode["bfloat16"]
    assert fit.hull["head_dim"] == (64, 64)
    assert float(Kernel("decode", fit, hw).seconds((9, 3), 16, 4096)) == pytest.approx(
        rows[4]["latency_s"], rel=2e-3
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"kind": "gemm", "dtype": "bfloat16", "n": 1, "m": 1, "latency_s": 1}],
            "need the columns n, k, m; no k",
        ),
        ([{"kind": "gem", "dtype": "bfloat16", "latency_s": 1}], "kind 'gem' is not a kernel; did you mean"),
        ([{"kind": "gemm", "dtype": "fp7", "n": 1, "k": 1, "m": 1, "latency_s": 1}], "dtype 'fp7' of a gemm"),
        (
            [{"m": 1, "n": 1, "k": 1, "dtype": "fp8", "latency": 1}],
            "looks like a table of GEMM .* no column latency_us",
        ),
        ([{"a": 1, "b": 2}], r"header \['a', 'b'\] is not a known table"),
    ],
)
def test_wrong_tables_are_one_line_that_names_the_fault(
    tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    file = write(tmp_path / "t.csv", rows)
    with pytest.raises(UsageError, match=message) as error:
        read_sources([file], "a100")
    assert str(error.value).startswith(str(file))
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="nothing to read"):
        read_sources([tmp_path], "a100")


def test_a_broken_parquet_file_and_an_empty_folder_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    with pytest.raises(UsageError, match="no CSV or Parquet file"):
        read_sources([tmp_path / "sub"], "a100")
    (tmp_path / "b.parquet").write_bytes(b"PAR1nonsense")
    with pytest.raises(UsageError, match="cannot be read as Parquet") as error:
        read_sources([tmp_path / "b.parquet"], "a100")
    assert "\n" not in str(error.value)


def test_facts_of_a_device_of_your_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    document = A100.model_dump(mode="json") | {"name": "mine"}
    file.write_text(json.dumps(document))
    assert facts_of(str(file)).name == "mine"
    file.write_text(json.dumps(document | {"num_sms": -1}))
    with pytest.raises(UsageError, match=r"--device .*mine\.json: not the facts of a device \(num_sms"):
        facts_of(str(file))
    with pytest.raises(UsageError, match="cannot be read"):
        facts_of(str(tmp_path / "none.json"))
