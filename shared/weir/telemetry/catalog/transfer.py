"""Figures of transfer services: the arena."""

from weir.telemetry.catalog.entry import rows

TRANSFER = rows(
    "transfer",
    """
total_pages > weir_arena_pages: Pages of the arena.
free_pages > weir_arena_free_pages: Pages that nobody has.
leased_pages > weir_arena_leased_pages: Pages that workers have.
cached_pages > weir_arena_cached_pages: Pages that nobody has and prompts can use again.
shared_pages > weir_arena_shared_pages: Cached pages that sequences use.
orphaned_pages > weir_arena_orphaned_pages: Pages of workers that died, not given on yet.
total_slots > weir_arena_slots: Slots for records of sequences.
free_slots > weir_arena_free_slots: Slots that nobody has.
orphaned_slots > weir_arena_orphaned_slots: Slots of workers that died, not given on yet.
leases > weir_arena_leases: Workers that have a lease.
suspect_leases > weir_arena_suspect_leases: Leases whose workers are silent.
fencing_leases > weir_arena_fencing_leases: Leases whose workers are being ended.
handoffs_total > weir_arena_hand_offs_total: Hand-offs that were committed.
handoffs_repeated_total > weir_arena_hand_offs_repeated_total: Hand-offs that were asked for again.
handoff_pages_total > weir_arena_hand_off_pages_total: Pages that changed hands.
handoff_bytes_copied_total > weir_arena_hand_off_copied_bytes_total: Bytes copied for hand-offs; on one host none.
fenced_total > weir_arena_workers_fenced_total: Workers that were ended since they were silent.
orphaned_total > weir_arena_sequences_orphaned_total: Sequences of workers that died.
adopted_total > weir_arena_sequences_adopted_total: Orphaned sequences that other workers went on with.
handed_over_total > weir_arena_sequences_handed_over_total: Sequences given away by workers that were emptied.
reclaimed_pages_total > weir_arena_reclaimed_pages_total: Orphaned pages that became free.
reclaimed_slots_total > weir_arena_reclaimed_slots_total: Orphaned slots that became free.
prefix_hit_pages_total > weir_arena_prefix_hit_pages_total: Pages of prompts that were found in the cache.
prefix_missed_pages_total > weir_arena_prefix_missed_pages_total: Full pages of prompts that were not.
prefix_waits_total > weir_arena_prefix_waits_total: Prompts that waited while another one computed their beginning.
prefix_pending > weir_arena_prefix_pending: Beginnings of prompts that are being computed, and waited for.
prefix_evicted_pages_total > weir_arena_prefix_evicted_pages_total: Cached pages that made room.
prefix_events_total > weir_arena_prefix_events_total: Changes of the cache told to the scheduler.
prefix_events_failures_total > weir_arena_prefix_event_failures_total: Changes of the cache that could not be told.
remote_prefixes_total > weir_arena_remote_prefixes_total: Beginnings of prompts that were to come from other hosts.
remote_prefixes_failed_total > weir_arena_remote_prefixes_failed_total: Those of which less came than was there.
remote_pages_received_total > weir_arena_remote_pages_received_total: Pages that came from other hosts.
remote_pages_wrong_total > weir_arena_remote_pages_wrong_total: Pages that came from other hosts, not as offered.
remote_streams_broken_total > weir_arena_remote_streams_broken_total: Streams of pages from other hosts that broke.
remote_pages_sent_total > weir_arena_remote_pages_sent_total: Pages that were sent to other hosts.
remote_pages_gone_total > weir_arena_remote_pages_gone_total: Pages asked for by other hosts that had been given away.
remote_busy_seconds_total > weir_arena_remote_busy_seconds_total: Seconds in which pages of a beginning were asked for.
remote_pages_offered_total > weir_arena_remote_pages_offered_total: Pages that were offered to other hosts.
remote_pages_direct_total > weir_arena_remote_pages_direct_total: Pages that were read from another arena's memory.
remote_pages_reserved > weir_arena_remote_pages_reserved: Pages that are on their way here.
remote_pages_pinned > weir_arena_remote_pages_pinned: Pages offered to other hosts, or of sequences coming here.
page_*_known_pages > weir_arena_page_tier_pages by tier: Pages of the model there, as far as is known here.
page_*_bytes > weir_arena_page_tier_bytes by tier: Bytes that count for the tier's bound, of all models together.
page_*_away > weir_arena_page_tier_away by tier: 1 while the tier does not answer, and nothing is asked of it.
page_*_unwritten_pages > weir_arena_page_tier_unwritten_pages by tier: Cached pages that are to be written there.
page_*_loads_total > weir_arena_page_tier_loads_total by tier: Beginnings of prompts that were to come from there.
page_*_loads_failed_total > weir_arena_page_tier_loads_failed_total by tier: Those that did not come, or in part.
page_*_loads_declined_total > weir_arena_page_tier_loads_declined_total by tier: Those that are computed sooner.
page_*_loaded_pages_total > weir_arena_page_tier_loaded_pages_total by tier: Pages that came from there.
page_*_loaded_bytes_total > weir_arena_page_tier_loaded_bytes_total by tier: Bytes of them.
page_*_load_seconds_total > weir_arena_page_tier_load_seconds_total by tier: Seconds that prompts waited for them.
page_*_load_rate > weir_arena_page_tier_load_rate by tier: Pages a second that a prompt gets, as measured.
page_*_prefill_rate > weir_arena_page_tier_prefill_rate by tier: Pages a second that are computed, as measured.
page_*_written_pages_total > weir_arena_page_tier_written_pages_total by tier: Pages written there.
page_*_written_bytes_total > weir_arena_page_tier_written_bytes_total by tier: Bytes of them.
page_*_write_seconds_total > weir_arena_page_tier_write_seconds_total by tier: Seconds that it took.
page_*_write_failures_total > weir_arena_page_tier_write_failures_total by tier: Times that pages could not be written.
page_*_lost_pages_total > weir_arena_page_tier_lost_pages_total by tier: Pages that made room before they were written.
page_*_evicted_total > weir_arena_page_tier_evicted_total by tier: Pages that this process removed to make room.
page_*_damaged_total > weir_arena_page_tier_damaged_total by tier: Pages that were not as written, and removed.
page_*_missing_total > weir_arena_page_tier_missing_total by tier: Pages that were gone when they were to be read.
page_*_failed_reads_total > weir_arena_page_tier_failed_reads_total by tier: Pages that could not be read.
weights_bytes > weir_arena_weights_bytes: Bytes of weights that workers of the device share.
weights_users > weir_arena_weights_users: Workers that use them.
""",
)
