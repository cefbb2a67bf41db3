"""Intervals of predicted figures: how far another run, or the real one, may be from the prediction.

`measure` asks a function for its figures under what is uncertain: calibration, the noise of steps and the sample of
requests. The function says what a figure is; here is only how its values become an interval.

For a figure y, on the log scale where it is a positive quantity:

- calibration moves it by d_k per standard deviation of the k-th factor (one run each, two deviations off, so that a
  kink is seen, such as host time overtaking device time); to first order its variance is the sum of the d_k squared;
- N replications draw everything anew; what first order does not explain of them has mean m and deviation s;
- the 95 % interval is y + m ± sqrt(1.96²·Σ d_k² + t²·s²·(1 + 1/N)), t with N − 1 degrees of freedom.

Effects add up only while a figure moves smoothly. A percentile where two populations meet (fast and slow replicas) jumps
by the whole distance between them: one run tells a slope that is none, and factors and replications multiply the
distance. But percentiles are monotone: P50 cannot lie above what bounds P75. So an end is the tightest of those of
every percentile on its side of the same distribution (a ladder), each of which bounds this one too.

It is a prediction interval: the next run under the same traffic lies in it, not merely the mean of many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from costmodel.uncertainty import Spread
from sim.record import Floats

NOISE_RUNS = 2
"""Runs in which nothing but the noise of steps is drawn, for its share of the variance."""
EFFECT_STEP = 2.0
"""Standard deviations by which one calibration factor is off in its run."""
Z975 = 1.959964
_T975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)  # fmt: skip
"""Student's t at 97.5 % for 1 to 30 degrees of freedom."""

Scale = Literal["log", "linear", "share"]
Figures = Mapping[str, float]


def t975(freedom: int) -> float:
    """Student's t quantile at 97.5 %; within 0.0006 of it beyond 30 degrees of freedom."""
    if freedom <= len(_T975):
        return _T975[freedom - 1]
    return Z975 + 2.3722 / freedom + 2.8225 / freedom**2


@dataclass(frozen=True, slots=True)
class Draw:
    """One state of the world. Zeroes and Nones are the nominal one."""

    normals: Mapping[str, float] = field(default_factory=dict)
    """Calibration: standard normal numbers by key of `costmodel.uncertainty.GroupSpread`."""
    noise_seed: int | None = None
    sample_seed: int | None = None
    """Of the workload; None keeps the nominal requests."""


@dataclass(frozen=True, slots=True)
class Interval:
    """95 % interval and where its variance comes from (shares add to 1, or are 0 when there is none)."""

    value: float
    low: float
    high: float
    calibration: float
    noise: float
    sampling: float
    """Another sample of requests, and what calibration does beyond first order."""

    @property
    def dominant(self) -> str:
        """The largest source."""
        return max(("calibration", "noise", "sampling"), key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class Replicated:
    """Figures under the nominal world, one calibration error at a time, noise alone, and everything at once.

    `effects` are keyed by calibration key; `replicas[i]` was drawn as `draws[i]`. Values are plain numbers by name.
    """

    nominal: Figures
    effects: Mapping[str, Figures]
    noise_only: tuple[Figures, ...]
    replicas: tuple[Figures, ...]
    draws: tuple[Draw, ...]
    shares: frozenset[str] = frozenset()
    """Names of figures that lie in 0 to 1."""
    ladders: tuple[tuple[str, ...], ...] = ()
    """Names of percentiles of one distribution each, in ascending order: no figure exceeds the next."""

    def names(self) -> tuple[str, ...]:
        """Figures that have an interval, without those that only bound others (`_p10_ttft`)."""
        return tuple(
            name for name in self.nominal if not name.startswith("_") and self.parts(name) is not None
        )

    def interval(self, name: str) -> Interval | None:
        """The figure's interval; None without replications, or where a run did not have the figure."""
        own, ladder = self._own(name), self.ladder(name)
        if own is None or not ladder:
            return own
        at = ladder.index(name)
        low = max(bound.low for rung in ladder[: at + 1] if (bound := self._own(rung)) is not None)
        high = min(bound.high for rung in ladder[at:] if (bound := self._own(rung)) is not None)
        return replace(own, low=min(low, own.value), high=max(high, own.value))

    def ladder(self, name: str) -> tuple[str, ...]:
        """Percentiles of the distribution that the figure is one of; empty where it is none."""
        return next((ladder for ladder in self.ladders if name in ladder), ())

    def _own(self, name: str) -> Interval | None:
        """The interval of a figure by itself."""
        parts = self.parts(name)
        if parts is None:
            return None
        scale = self.scale(name)
        at = _to(scale, self.nominal[name])
        low, high = parts.range()
        value = self.nominal[name]
        low, high = (_back(scale, at + end) for end in (low, high))
        return Interval(value, min(low, value), max(high, value), *parts.sources())

    def scale(self, name: str) -> Scale:
        """Shares stay within 0 to 1; positive quantities vary by factors; anything else by differences."""
        if name in self.shares:
            return "share"
        every = [self.nominal, *self.effects.values(), *self.noise_only, *self.replicas]
        return "log" if all(figures.get(name, 0.0) > 0 for figures in every) else "linear"

    def parts(self, name: str, scale: Scale | None = None) -> Parts | None:
        """Deviations of a figure from its nominal value by source, on `scale` (its own by default)."""
        if len(self.replicas) < 2:
            return None
        scale = scale or self.scale(name)
        every = [self.nominal, *self.effects.values(), *self.noise_only, *self.replicas]
        if not all(math.isfinite(figures.get(name, math.nan)) for figures in every):
            return None
        at = _to(scale, self.nominal[name])
        effects = {
            key: (_to(scale, figures[name]) - at) / EFFECT_STEP for key, figures in self.effects.items()
        }
        noise = np.array([_to(scale, figures[name]) - at for figures in self.noise_only])
        rest = np.array([_to(scale, figures[name]) - at for figures in self.replicas])
        for i, draw in enumerate(self.draws):
            rest[i] -= sum(effect * draw.normals.get(key, 0.0) for key, effect in effects.items())
        return Parts(effects, noise, rest)


@dataclass(frozen=True, slots=True)
class Parts:
    """Deviations from the nominal value: by one standard deviation of each calibration factor, by noise alone, and
    what is left of each replication without first-order calibration."""

    effects: Mapping[str, float]
    noise: Floats
    rest: Floats

    def minus(self, other: Parts) -> Parts:
        """Deviations of the difference of two figures that met the same draws."""
        keys = dict.fromkeys([*self.effects, *other.effects])
        effects = {key: self.effects.get(key, 0.0) - other.effects.get(key, 0.0) for key in keys}
        count = min(len(self.rest), len(other.rest))
        noise = min(len(self.noise), len(other.noise))
        return Parts(
            effects, self.noise[:noise] - other.noise[:noise], self.rest[:count] - other.rest[:count]
        )

    def range(self) -> tuple[float, float]:
        """Ends of the 95 % interval, as deviations."""
        count = len(self.rest)
        calibration = sum(effect**2 for effect in self.effects.values())
        variance = float(self.rest.var(ddof=1)) * (1 + 1 / count)
        half = math.sqrt(Z975**2 * calibration + t975(count - 1) ** 2 * variance)
        middle = float(self.rest.mean())
        return middle - half, middle + half

    def sources(self) -> tuple[float, float, float]:
        """Shares of the variance: calibration, noise, sampling."""
        calibration = sum(effect**2 for effect in self.effects.values())
        rest = float(self.rest.var(ddof=1))
        noise = min(float((self.noise**2).mean()) if len(self.noise) else 0.0, rest)
        total = calibration + rest
        if total <= 0:
            return 0.0, 0.0, 0.0
        return calibration / total, noise / total, (rest - noise) / total


def plan_draws(spread: Spread, *, seed: int, replications: int, resample: bool) -> list[Draw]:
    """The worlds to run: nominal, one per calibration factor, noise alone, then the replications.

    The same seed draws the same worlds for every deployment, so that differences between deployments are paired.
    """
    draws = [Draw()]
    if replications < 2:
        return draws
    draws += [Draw(normals={key: EFFECT_STEP}) for key in spread.scale()]
    draws += [Draw(noise_seed=_seed(seed, i, 1)) for i in range(NOISE_RUNS)]
    draws += [
        Draw(spread.draw(seed, i), _seed(seed, i, 2), _seed(seed, i, 3) if resample else None)
        for i in range(replications)
    ]
    return draws


def _seed(seed: int, index: int, purpose: int) -> int:
    return int(np.random.SeedSequence((seed, index, purpose)).generate_state(1)[0])


def gather(
    spread: Spread,
    draws: Sequence[Draw],
    results: Sequence[Figures],
    *,
    shares: Iterable[str] = (),
    ladders: Iterable[Sequence[str]] = (),
) -> Replicated:
    """Put the figures of `plan_draws`'s worlds, in its order, together."""
    keys = tuple(spread.scale()) if len(draws) > 1 else ()
    noise = NOISE_RUNS if len(draws) > 1 else 0
    first = 1 + len(keys) + noise
    return Replicated(
        nominal=results[0],
        effects=dict(zip(keys, results[1 : 1 + len(keys)], strict=True)),
        noise_only=tuple(results[1 + len(keys) : first]),
        replicas=tuple(results[first:]),
        draws=tuple(draws[first:]),
        shares=frozenset(shares),
        ladders=tuple(tuple(ladder) for ladder in ladders),
    )


def measure(
    evaluate: Callable[[Draw], Figures],
    spread: Spread,
    *,
    seed: int,
    replications: int,
    resample: bool = True,
    shares: Iterable[str] = (),
    ladders: Iterable[Sequence[str]] = (),
) -> Replicated:
    """Figures of `evaluate` with intervals. It must depend on its draw alone."""
    draws = plan_draws(spread, seed=seed, replications=replications, resample=resample)
    return gather(spread, draws, [evaluate(draw) for draw in draws], shares=shares, ladders=ladders)


@dataclass(frozen=True, slots=True)
class Difference:
    """B minus A, paired: both met the same calibration errors, noise and requests."""

    a: float
    b: float
    low: float
    high: float
    calibration: float
    noise: float
    sampling: float

    @property
    def value(self) -> float:
        return self.b - self.a

    @property
    def differs(self) -> bool:
        """Whether the interval leaves 0 out."""
        return not self.low <= 0.0 <= self.high

    @property
    def words(self) -> str:
        """`higher`, `lower` or `no difference`."""
        return ("higher" if self.value > 0 else "lower") if self.differs else "no difference"


def compare(a: Replicated, b: Replicated) -> dict[str, Difference]:
    """Paired differences of the figures that both have, in the figures' own units.

    On the log scale the interval is of the ratio, and its ends are turned into differences from A's value. A difference
    of percentiles cannot leave what their own intervals allow. Both must come from the same seed and number of
    replications.
    """
    out: dict[str, Difference] = {}
    for name in a.nominal:
        if name not in b.nominal or name.startswith("_"):
            continue
        scale: Scale = "log" if a.scale(name) == b.scale(name) == "log" else "linear"
        first, second = a.parts(name, scale), b.parts(name, scale)
        if first is None or second is None:
            continue
        parts = second.minus(first)
        low, high = parts.range()
        before, after = a.nominal[name], b.nominal[name]
        change = _to(scale, after) - _to(scale, before)
        ends = [_back(scale, _to(scale, before) + change + end) - before for end in (low, high)]
        value = after - before
        if a.ladder(name) and b.ladder(name):
            one, other = a.interval(name), b.interval(name)
            assert one is not None
            assert other is not None
            ends = [max(min(ends), other.low - one.high), min(max(ends), other.high - one.low)]
        out[name] = Difference(before, after, min(*ends, value), max(*ends, value), *parts.sources())
    return out


def _to(scale: Scale, value: float) -> float:
    return math.log(value) if scale == "log" else value


def _back(scale: Scale, value: float) -> float:
    if scale == "log":
        return math.exp(min(value, 700.0))
    return min(max(value, 0.0), 1.0) if scale == "share" else value
