"""What `GET /metrics` of a gateway is answered with: its own figures, its neighbours', and vLLM's names."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from weir.core.life import Phase
from weir.telemetry.described import Described, families_of
from weir.telemetry.exposition import Page, render
from weir.telemetry.families import Family, gathered
from weir.telemetry.page_cache import PageCache
from weir_gateway.metrics.neighbours import Neighbours, NeighbourWatch
from weir_gateway.metrics.steady_sums import SteadySums
from weir_gateway.metrics.vllm_names import ModelView, vllm_families
from weir_gateway.requests.models import ModelDirectory
from weir_gateway.requests.request_figures import RequestFigures
from weir_gateway.requests.request_state import RequestState

_OF_TENANTS = "weir_tenant_"


class VllmMetrics:
    """vLLM's names for each model."""

    def __init__(self, requests: Mapping[str, RequestState], figures: RequestFigures, models: ModelDirectory) -> None:
        """`requests`: those that have not ended, always as they are now."""
        self._requests = requests
        self._figures = figures
        self._models = models
        self._sums: dict[str, SteadySums] = {}

    def families(self, neighbours: Neighbours) -> list[Family]:
        phases: dict[str, Counter[Phase]] = {}
        for state in self._requests.values():
            phases.setdefault(state.checked.model.name, Counter())[state.phase] += 1
        families: list[Family] = []
        for model in self._models.list_models():
            workers = tuple(one for one in neighbours.workers if one[0].model == model.name)
            view = ModelView(
                lanes=self._figures.of_model(model.name, model.max_context_tokens),
                phases=phases.get(model.name, Counter()),
                neighbours=Neighbours(workers, neighbours.others),
                sums=self._sums.setdefault(model.name, SteadySums()),
            )
            families.extend(vllm_families(model.name, view))
        return families


class MetricsPage:
    """Kept for a moment: whoever scrapes then is answered with the same."""

    def __init__(
        self, describe: Callable[[], Described], watch: NeighbourWatch, vllm_metrics: VllmMetrics | None
    ) -> None:
        """`describe`: this gateway. `vllm_metrics`: None where they are not wanted."""
        self._describe = describe
        self._watch = watch
        self._vllm_metrics = vllm_metrics
        self._pages = PageCache[bool, Page]()

    async def page(self, *, as_openmetrics: bool) -> Page:
        """Without figures by tenant, which are none of another tenant's business."""

        async def make() -> Page:
            families = await self._families()
            shown = [one for one in families if not one.name.startswith(_OF_TENANTS)]
            return await render(shown, as_openmetrics=as_openmetrics)

        return await self._pages.page(as_openmetrics, make)

    async def _families(self) -> list[Family]:
        neighbours = await self._watch.neighbours()
        families: list[Family] = []
        for process in (self._describe(), *neighbours.all):
            families.extend(families_of(process))
            await asyncio.sleep(0)  # requests go on between two processes
        of_vllm = [] if self._vllm_metrics is None else self._vllm_metrics.families(neighbours)
        return gathered([*families, *of_vllm])
