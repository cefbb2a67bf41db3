"""The way between clients and server as it is written in YAML: round trips, lines, connections, readers, the gateway.

`Network.ways` works it out for each tenant of a workload; `sim.wire` carries the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from serving.errors import UsageError, nearest
from sim.record import Tenant

if TYPE_CHECKING:
    from sim.deployment import Deployment
    from sim.workload.types import Workload

Protocol = Literal["http/1.1", "http/1.1-pipelined", "http/2"]
Part = Literal["rtt", "bandwidth", "connections", "reader", "gateway"]
SHARED = ("protocol", "connections", "handshake_round_trips")
"""What means nothing where every conversation has a client of its own, beside `clients`."""
_NEEDS_CONNECTIONS = ("http/1.1", "http/1.1-pipelined")


class Way(BaseModel):
    """Between the clients of a tenant and the server. What is not set is as without a network: at once."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    rtt_ms: float | None = Field(default=None, ge=0, le=3.6e6, allow_inf_nan=False)
    """Network round trip, instead of the workload's."""
    bandwidth_mbit_s: float | None = Field(default=None, ge=1e-6, allow_inf_nan=False)
    """Line to each client, in 10^6 bits per second; all streams of the client share it."""
    upload_mbit_s: float | None = Field(default=None, ge=1e-6, allow_inf_nan=False)
    """Line from each client, which prompts take; all requests of the client share it."""
    clients: int | None = Field(default=None, ge=1)
    """Clients that the requests are dealt to in turn, a conversation to one; by default each has its own."""
    protocol: Protocol | None = None
    """http/1.1 (a connection carries one request at a time), http/1.1-pipelined (many, answered in order) or http/2
    (streams of one connection; the default)."""
    connections: int | None = Field(default=None, ge=1)
    """Of a client under http/1.1 (6 by default, as browsers have) or http/1.1-pipelined (1 by default)."""
    handshake_round_trips: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    """Round trips that opening a connection takes: 1 for TCP, 2 with TLS 1.3; by default all stand open."""
    reader_tokens_per_s: float | None = Field(default=None, ge=1e-3, allow_inf_nan=False)
    """Tokens a second that a client takes out of a stream; by default as they come."""
    window_kib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """What a stream (http/2) or a connection may have under way and unread, by default without limit."""


class Network(Way):
    """The way of all tenants, and by name what is otherwise for some of them."""

    shared: bool = False
    """All tenants share the clients, as behind one gateway; they may then differ in reader_tokens_per_s alone."""
    event_bytes: int = Field(default=250, ge=1, le=1 << 30)
    """Bytes of an event with one token, its JSON and framing (about 250 in the OpenAI API)."""
    token_bytes: float = Field(default=4.5, gt=0, allow_inf_nan=False)
    """Bytes of text for each token of a prompt, and for each further token of an event."""
    gateway_event_us: float = Field(default=0.0, ge=0, le=3.6e9, allow_inf_nan=False)
    """What a gateway adds to the way of each event; frontend_overhead_ms is what it adds to a request."""
    buffer_kib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """What the server keeps of a stream for a client that does not read; without limit by default."""
    send_timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """How long a stream may be at the limit of its buffer before it is cut (30 by default)."""
    tenants: dict[str, Way] = Field(default_factory=dict)
    """By name of a tenant or of an SLO class what is otherwise for it."""
    without: tuple[Part, ...] = ()
    """Parts to leave out, to see their share: rtt, bandwidth, connections, reader, gateway."""

    @field_validator("without", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Network:
        for where, way in (("", self), *((f"tenants: {n}: ", w) for n, w in self.tenants.items())):
            merged = self.merged(way)
            if merged.clients is None:
                for field in SHARED:
                    if getattr(way, field) is not None:
                        raise ValueError(f"{where}{field} has an effect only with clients, which share them")
            elif merged.protocol not in _NEEDS_CONNECTIONS and way.connections is not None:
                raise ValueError(
                    f"{where}connections has an effect only with protocol http/1.1 or http/1.1-pipelined"
                )
        if self.shared and self.clients is None:
            raise ValueError("shared has an effect only with clients")
        for name, way in self.tenants.items() if self.shared else ():
            if own := [name for name in way.model_dump(exclude_none=True) if name != "reader_tokens_per_s"]:
                raise ValueError(
                    f"tenants: {name}: {own[0]} is that of the clients, which all tenants share; set it for all"
                )
        ways = [self.merged(way) for way in (self, *self.tenants.values())]
        parts = {
            "bandwidth": ("bandwidth_mbit_s", "upload_mbit_s"),
            "connections": ("protocol", "handshake_round_trips"),
            "reader": ("reader_tokens_per_s", "window_kib"),
        }
        for part in self.without:
            if part in parts and all(getattr(way, name) is None for way in ways for name in parts[part]):
                raise ValueError(
                    f"without: {part} is not there to be left out; set {parts[part][0]} or drop it"
                )
        if self.buffer_kib is not None and all(
            way.reader_tokens_per_s is None and way.bandwidth_mbit_s is None for way in ways
        ):
            raise ValueError("buffer_kib has an effect only with reader_tokens_per_s or bandwidth_mbit_s")
        if self.send_timeout_s is not None and self.buffer_kib is None:
            raise ValueError("send_timeout_s has an effect only with buffer_kib")
        return self

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # `tenants` is a mapping

    def merged(self, way: Way) -> Way:
        """A tenant's own words over those for all."""
        own = way.model_dump(include=set(Way.model_fields), exclude_none=True)
        return Way(**{**self.model_dump(include=set(Way.model_fields)), **own})

    def ways(self, tenants: Sequence[Tenant]) -> list[Line]:
        """The way of each tenant in plain units. Raises `UsageError` for a name that no tenant has.

        So it does for round trips to leave out where there are none.
        """
        known = {name for tenant in tenants for name in (tenant.name, tenant.slo_class) if name}
        for name in self.tenants:
            if name not in known:
                raise UsageError(
                    f"--network: tenants: no tenant or class is called {name!r}; {nearest(name, known)}"
                )
        out = []
        for tenant in tenants:
            own = self.tenants.get(tenant.name) or self.tenants.get(tenant.slo_class) or self
            out.append(self._line(self.merged(own), tenant))
        if "rtt" in self.without and not any(line.rtt_s for line in out):
            raise UsageError("--network: without: rtt is not there to be left out; set rtt_ms or drop it")
        if "rtt" in self.without:
            out = [replace(line, rtt_s=0.0) for line in out]
        if self.shared and len({line.rtt_s for line in out}) > 1:
            raise UsageError("--network: shared: the workload's tenants differ in rtt_ms; set rtt_ms for all")
        return out

    def _line(self, way: Way, tenant: Tenant) -> Line:
        off = set(self.without)
        protocol = way.protocol or "http/2"
        connections = way.connections or (6 if protocol == "http/1.1" else 1)
        down, up = (
            0.0 if rate is None or "bandwidth" in off else 8e-6 / rate
            for rate in (way.bandwidth_mbit_s, way.upload_mbit_s)
        )
        rtt_s = tenant.rtt_s if way.rtt_ms is None else way.rtt_ms / 1e3
        free = "connections" in off
        return Line(
            rtt_s=rtt_s,
            down_s_per_byte=down,
            up_s_per_byte=up,
            clients=way.clients,
            protocol="http/2" if free else protocol,
            connections=connections,
            handshakes=0.0 if free else way.handshake_round_trips or 0.0,
            pace_s=0.0
            if way.reader_tokens_per_s is None or "reader" in off
            else 1.0 / way.reader_tokens_per_s,
            window_bytes=float("inf") if way.window_kib is None or "reader" in off else way.window_kib * 1024,
        )


@dataclass(frozen=True, slots=True)
class Line:
    """`Way` of a tenant in seconds and bytes; nothing is unset."""

    rtt_s: float = 0.0
    down_s_per_byte: float = 0.0
    up_s_per_byte: float = 0.0
    clients: int | None = None
    protocol: Protocol = "http/2"
    connections: int = 1
    handshakes: float = 0.0
    pace_s: float = 0.0
    """Seconds that a client takes over a token."""
    window_bytes: float = float("inf")

    @property
    def waits(self) -> bool:
        """Requests may have to wait for a connection."""
        return self.protocol == "http/1.1" and self.clients is not None

    @property
    def pipelines(self) -> bool:
        """Answers come in the order of their requests."""
        return self.protocol == "http/1.1-pipelined" and self.clients is not None


@dataclass(frozen=True, slots=True)
class Delivering:
    """How answers leave the server and reach their clients; what `sim.clients` works from."""

    lines: tuple[Line, ...]
    """By tenant."""
    stream_interval: int = 1
    stream_slice_s: float = 0.0
    event_bytes: int = 250
    token_bytes: float = 4.5
    gateway_event_s: float = 0.0
    buffer_bytes: float = float("inf")
    send_timeout_s: float = 30.0
    shared: bool = False
    """Clients are those of all tenants."""


def check_network(d: Deployment) -> None:
    """Raise `UsageError` for what cannot be together or has no effect."""
    from sim.fleet.build import is_fleet

    if d.stream_interval > 1 and d.stream_slice_ms:
        raise UsageError(
            "--stream-interval and --stream-slice-ms are two ways to gather tokens; use one of them"
        )
    if d.network is None:
        return
    if "gateway" in d.network.without and not (d.network.gateway_event_us or d.frontend_overhead_ms):
        raise UsageError(
            "--network: without: gateway is not there to be left out; set gateway_event_us or "
            "--frontend-overhead-ms, or drop it"
        )
    if d.failures is not None:
        raise UsageError(
            "--network does not follow requests that begin again; leave --failures or --network out"
        )
    if d.network.buffer_kib is not None and (is_fleet(d) or d.pipeline_parallel_size > 1):
        raise UsageError(
            "--network: buffer_kib: clients are cut off only from fixed replicas without a pipeline; leave it out"
        )


def check_gathering(workload: Workload, net: Delivering | None) -> None:
    """Raise `UsageError` where tokens are to be gathered and no answer is a stream of them."""
    if net is None or (net.stream_interval == 1 and not net.stream_slice_s):
        return
    if len(workload) and workload.come_whole().all():
        option = "--stream-slice-ms" if net.stream_slice_s else "--stream-interval"
        raise UsageError(
            f"{option} has no effect on answers that come whole (--beam-width, --best-of); leave it out"
        )


def delivering(
    network: Network | None, tenants: Sequence[Tenant], *, interval: int, slice_s: float
) -> Delivering | None:
    """What a run needs to follow its streams; None where every token goes its own way at once."""
    if network is None:
        if interval == 1 and not slice_s:
            return None
        network = Network()
    gateway_s = 0.0 if "gateway" in network.without else network.gateway_event_us / 1e6
    return Delivering(
        lines=tuple(network.ways(tenants)),
        stream_interval=interval,
        stream_slice_s=slice_s,
        event_bytes=network.event_bytes,
        token_bytes=network.token_bytes,
        gateway_event_s=gateway_s,
        buffer_bytes=float("inf") if network.buffer_kib is None else network.buffer_kib * 1024,
        send_timeout_s=30.0 if network.send_timeout_s is None else network.send_timeout_s,
        shared=network.shared,
    )
