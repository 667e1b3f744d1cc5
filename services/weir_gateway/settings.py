"""The settings of a gateway's parts, from its configuration."""

from dataclasses import dataclass, field

from weir.bus.audit import AuditBounds
from weir_gateway.audit import AuditSettings
from weir_gateway.batches.jobs import BatchSettings
from weir_gateway.batches.lines import LineBounds
from weir_gateway.batches.runner import RunnerSettings
from weir_gateway.batches.store import BatchBounds
from weir_gateway.config import GatewayConfig
from weir_gateway.driving.adoption import AdoptionSettings
from weir_gateway.driving.driver import DriverSettings
from weir_gateway.driving.scheduler_port import SchedulerPortSettings
from weir_gateway.frontends.event_stream import StreamSettings
from weir_gateway.frontends.http_server import HttpSettings
from weir_gateway.keys.keyed_requests import KeySettings
from weir_gateway.recent.store import RecentSettings
from weir_gateway.requests.migration import MigrationSettings
from weir_gateway.requests.validation import Limits
from weir_gateway.workers.connection import ConnectionSettings


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Bounds and waits of each part."""

    instance: str
    port: SchedulerPortSettings = field(default_factory=SchedulerPortSettings)
    driver: DriverSettings = field(default_factory=DriverSettings)
    adoption: AdoptionSettings = field(default_factory=AdoptionSettings)
    migration: MigrationSettings = field(default_factory=MigrationSettings)
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
    limits: Limits = field(default_factory=Limits)
    keys: KeySettings = field(default_factory=KeySettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    recent: RecentSettings = field(default_factory=RecentSettings)
    report_interval_s: float = 1.0
    access_wait_s: float = 8.0
    """Waited at the start for the rules of access; without them it starts, and lets nobody in."""
    is_lower_priority_first: bool = False
    keeps_responses: bool = True
    max_console_watchers: int = 16
    has_vllm_metrics: bool = True
    batches: BatchSettings = field(default_factory=BatchSettings)
    audit: AuditSettings | None = None
    """None: no life events are kept."""

    @classmethod
    def of(cls, config: GatewayConfig) -> "GatewaySettings":
        return cls(
            instance=config.instance,
            port=SchedulerPortSettings(
                outage_s=config.scheduler_wait_s, accepted_outage_s=config.accepted_scheduler_wait_s
            ),
            driver=DriverSettings(
                max_requests=config.max_requests, max_queue_s=config.max_queue_s, no_progress_s=config.no_progress_s
            ),
            adoption=AdoptionSettings(wait_s=config.adopter_wait_s, claim_wait_s=config.claim_wait_s),
            connections=ConnectionSettings(lost_after_s=config.worker_lost_s),
            limits=Limits(
                default_max_tokens=config.default_max_tokens,
                max_prompt_bytes=config.max_prompt_bytes,
                max_prompts=config.max_prompts,
                max_prompt_logprobs=config.max_prompt_logprobs,
                prepare_share=config.prepare_share,
            ),
            keys=KeySettings(
                resume_s=config.resume_s, max_kept=config.max_kept, max_kept_bytes=config.max_kept_mb << 20
            ),
            http=HttpSettings(
                host=config.http_host,
                port=config.http_port,
                max_connections=config.max_calls,
                max_idle_connections=config.max_idle_connections,
                max_body_bytes=config.body_bytes,
                streams=StreamSettings(
                    send_timeout_s=config.send_timeout_s,
                    keep_alive_s=config.sse_keep_alive_s,
                    after_error=config.after_stream_error,
                ),
                unknown_fields=config.unknown_fields,
            ),
            recent=RecentSettings(config.max_recent_requests, config.max_recent_mb << 20),
            access_wait_s=config.scheduler_wait_s,
            is_lower_priority_first=config.openai_priority == "lower-first",
            keeps_responses=config.keeps_responses,
            max_console_watchers=config.max_console_watchers,
            has_vllm_metrics=config.vllm_metrics,
            batches=_batches_of(config),
            audit=(
                AuditSettings(AuditBounds(config.audit_mb << 20, config.audit_hours * 3600)) if config.audit else None
            ),
        )


def _batches_of(config: GatewayConfig) -> BatchSettings:
    return BatchSettings(
        url=config.batch_url,
        max_file_bytes=config.batch_file_mb << 20,
        max_tenant_bytes=config.batch_tenant_mb << 20,
        bounds=BatchBounds(
            LineBounds(max_lines=config.batch_max_lines),
            max_open=config.batch_max_open,
            keeps_s=config.batch_keep_days * 86_400,
        ),
        runner=RunnerSettings(max_at_once=config.batch_at_once, lease_s=config.batch_lease_s),
    )
