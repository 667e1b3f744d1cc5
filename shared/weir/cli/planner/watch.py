"""One look at a running stack: the gateways' pages of metrics, and the workers as the leading scheduler has them."""

import time
from collections.abc import Mapping, Sequence

import httpx

from weir.cli.planner.capacity import MeasuredCapacity, measured_profile
from weir.cli.planner.figures import PROMPTS, Distribution, Figures, FiguresMissing, observation_of, with_backlog
from weir.client.workers import WorkersClient, WorkerView
from weir.core.errors import WeirError
from weir.core.roles import WORKER_ROLES, WorkerRole
from weir.planner.observation import Observation, PoolCount
from weir.sim.profile import CostProfile
from weir.sim.results.metrics import Slo
from weir.sim.spec import PoolSpec

_TIMEOUT_S = 5.0
_MAX_PAGE_BYTES = 16 << 20
_MAX_PROMPTS = 256


class GatewayPages:
    """Their metrics, read again and again. To be closed."""

    def __init__(self, urls: Sequence[str], api_key: str) -> None:
        """`api_key`: a tenant's, that gateways ask of who reads their pages."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._clients = [httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S) for url in urls]

    def read(self) -> Figures:
        """Raises FiguresMissing, saying who does not answer, or with what."""
        pages = [self._page(client) for client in self._clients]
        try:
            return Figures.parse(time.monotonic(), pages)
        except ValueError as error:
            raise FiguresMissing(f"a page of metrics: what a gateway answers is none ({error!s:.80})") from error

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _page(self, client: httpx.Client) -> str:
        """Raises FiguresMissing. It is read no further than it may be long."""
        content, end_s = bytearray(), time.monotonic() + _TIMEOUT_S
        try:
            with client.stream("GET", "/metrics") as response:
                if response.status_code != 200:
                    raise FiguresMissing(f"{client.base_url}/metrics: status {response.status_code}")
                for part in response.iter_bytes():
                    content += part
                    if len(content) > _MAX_PAGE_BYTES or time.monotonic() > end_s:
                        bounds = f"{_MAX_PAGE_BYTES >> 20} MiB or {_TIMEOUT_S:g} s"
                        raise FiguresMissing(f"{client.base_url}/metrics: takes more than {bounds}")
        except httpx.HTTPError as error:
            raise FiguresMissing(f"{client.base_url}: does not answer ({type(error).__name__})") from error
        return content.decode(errors="replace")


class StackWatch:
    """Looks at one stack again and again; what has come about is told from one look to the next. To be closed."""

    def __init__(
        self,
        urls: Sequence[str],
        api_key: str,
        workers: WorkersClient,
        capacity: MeasuredCapacity,
        slo: Slo,
        profile: CostProfile | None,
    ) -> None:
        """`api_key`: a tenant's, that gateways ask of who reads their pages. `profile`: of each worker; None: what they
        have measured themselves."""
        self._pages = GatewayPages(urls, api_key)
        self._workers = workers
        self._capacity = capacity
        self._slo = slo
        self._profile = profile
        self._before: Figures | None = None
        self._prompts: tuple[int, ...] = ()

    def close(self) -> None:
        self._pages.close()

    def look(self) -> tuple[Observation, list[WorkerView]] | None:
        """None at the first look. Raises FiguresMissing, saying what is missing or who does not answer."""
        figures = self._pages.read()
        before, self._before = self._before, figures
        try:
            workers = self._workers.list()
        except WeirError as error:
            raise FiguresMissing(f"the workers: {error.message}") from error
        if len({worker.model for worker in workers}) > 1:
            models = ", ".join(sorted({worker.model for worker in workers}))
            raise FiguresMissing(f"one model: the planner plans for a stack of one, and here are {models}")
        counts = {role: _count(workers, role) for role in WORKER_ROLES}
        self._measure(figures, counts)
        if before is None:
            self._prompts = Distribution.so_far(figures, PROMPTS).lengths()
            return None
        seen = observation_of(before, figures, counts, self._slo.ttft_s, self._slo.tpot_s)
        self._prompts = (*seen.prompt_lengths, *self._prompts)[:_MAX_PROMPTS]
        return with_backlog(seen, figures, self._prompts), workers

    def _measure(self, figures: Figures, counts: Mapping[WorkerRole, PoolCount]) -> None:
        """Raises FiguresMissing until workers of both roles have measured their steps."""
        specs: dict[WorkerRole, PoolSpec] = {}
        num_pages = figures.try_gauge("weir_arena_pages")
        figures = figures.of_those_that_serve()
        for role in WORKER_ROLES:
            num = max(1, counts[role].serving + counts[role].draining)
            step = figures.step_cost(role)
            profile = self._profile
            if profile is None:
                if step is None:
                    if self._capacity.is_known:
                        return
                    raise FiguresMissing(f"weir_worker_step_cost of {role} workers; give --profile until there is one")
                if num_pages is None:
                    raise FiguresMissing("weir_arena_pages; give --profile where gateways do not reach the arenas")
                profile = measured_profile(step, round(num_pages / max(1, counts["decode"].serving)))
            num_seqs = round(figures.gauge("weir_worker_max_sequences", role) / num)
            num_tokens = round(figures.gauge("weir_worker_max_batched_tokens", role) / num)
            sizes = (max(1, num_seqs), max(1, num_tokens), max(1, num_tokens))
            specs[role] = PoolSpec(role, 1, profile, *sizes)
        self._capacity.measure(specs["prefill"], specs["decode"], max_tokens=figures.mean_max_tokens())


def _count(workers: Sequence[WorkerView], role: WorkerRole) -> PoolCount:
    """A worker that is not registered yet is not seen; whoever orders workers knows of it."""
    duties = [worker.duty for worker in workers if worker.role == role]
    return PoolCount(duties.count("serving"), 0, duties.count("draining"))
