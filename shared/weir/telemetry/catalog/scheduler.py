"""Figures of schedulers. A standby has few."""

from weir.telemetry.catalog.entry import rows

SCHEDULER = rows(
    "scheduler",
    """
is_leader: Whether this scheduler leads.
leader_key_is_stuck: Whether it leads and cannot write the leader key.
depositions_total: Times another scheduler took the lead from it.
epoch: Its epoch as leader.
is_gathering: Whether it waits for gateways to report before it places.
workers: Workers that are heard.
gateways: Gateways that are heard.
queued > weir_scheduler_requests_queued: Requests that wait.
granted > weir_scheduler_requests_granted: Requests that were granted and have not ended.
reserved_pages: Pages that are reserved for granted requests.
prefills_in_flight: Granted requests without a first token.
tombstones: Ended requests whose late messages are still refused.
tenant_counters: Tenants with a virtual token counter.
queued_* > weir_lane_requests_queued by lane: Requests that wait in a lane.
lane_in_flight > weir_lane_requests_in_flight: Granted requests of a lane that have not ended.
lane_oldest_wait_s > weir_lane_oldest_wait_seconds: How long the first in a lane's queue has waited.
submitted_total > weir_scheduler_requests_submitted_total: Requests that gateways submitted, repeats too.
granted_*_total > weir_lane_grants_total by lane: Grants by lane.
ended_*_total > weir_scheduler_requests_ended_total by outcome: Granted requests that ended, by outcome.
refused_*_total > weir_scheduler_refusals_total by reason: Requests refused on arrival, by reason.
revoked_*_total > weir_scheduler_revocations_total by reason: Requests given up while they waited, by reason.
placed_*_total > weir_scheduler_placements_total by kind: Placements: split or local, with a cached beginning or not.
adopted_total > weir_scheduler_requests_adopted_total: Requests of gateways that an earlier scheduler had granted.
migrations_*_total > weir_scheduler_migrations_total by outcome: Migrations to other hosts; see hosts.md.
migrations_under_way: Requests for which room is kept at another host.
rebalanced_total: Of the migrations that were planned, those from a crowded decode worker, or to make room.
freeness_min: By what part the batch of the most crowded decode worker could grow; idle: 1000. While rebalances is on.
freeness_max: The same of the least crowded one.
workers_lost_total: Workers that were heard no more.
gateways_lost_total: Gateways that were heard no more.
worker_malformed_total: Entries of the registry that say what cannot be.
prefix_arenas: Arenas whose cached pages are known.
prefix_pages_known: Cached pages that are known.
prefix_gaps_total: Changes of caches that were missed.
links_measured: Links between arenas that were measured lately.
link_bytes_per_second_min: Rate of the slowest of them.
link_bytes_per_second_max: Rate of the quickest of them.
messages_under_way: Grants and revocations that are not answered yet.
open_queue_spans: Spans of requests that wait.
counters_save_failures_total: Tenants' counters that could not be saved.
counters_malformed_total: Saved counters that could not be read.
limits_reloads_total: Times the limits file was read anew.
limits_reload_errors_total: Times the limits file could not be used.
limits_file_is_wrong: Whether the limits file cannot be used as it is now.
limits_overrides: Limits that operators have set over the file's.
limits_tuned: Bounds of workers that a tuner has kept.
limits_on_trial: Bounds that a tuner tries on single workers.
rules_unpublished: Rules that gateways or workers were not told yet.
operators_refused_total: Calls of operators without a valid key.
changes_*_total > weir_scheduler_changes_total by outcome: Changes of operators, written to their file or lost there.
malformed_messages_total: Messages that could not be read.
""",
)
