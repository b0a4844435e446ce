"""The pool and the scheduler that the options ask for, and what the start-up table says of them."""

from __future__ import annotations

from octavo.engine.config import Budget, EngineConfig
from octavo.kv import Pool, Priority
from octavo.sched import AnyPool, Scheduler, SchedulerConfig


def make_pool(config: EngineConfig, budget: Budget) -> Pool:
    """The paged pool. Cached blocks of requests with a higher priority stay longer, where the schedule
    goes by priority."""
    return Pool(
        budget.num_blocks,
        budget.block_size,
        prefix_caching=config.prefix_caching,
        policy=Priority() if config.schedule == "priority" else None,
        host_blocks=budget.host_blocks,
        disk_blocks=budget.disk_blocks,
    )


def make_scheduler(config: EngineConfig, budget: Budget, pool: AnyPool) -> Scheduler:
    """The scheduler over `pool`."""
    return Scheduler(
        pool,
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            max_model_len=budget.max_model_len,
            order=config.schedule,
            tenant_weights=config.tenant_weights or {},
            max_queue=config.max_queue,
            preemption=config.preemption,
        ),
    )


def scheduling_rows(config: EngineConfig, budget: Budget) -> list[tuple[str, str]]:
    """Rows for the start-up table."""
    if config.preemption == "recompute" or (config.preemption == "auto" and not budget.host_blocks):
        how = "recompute"
        if config.preemption == "auto":
            how += " (auto; --host-cache SIZE would let sequences be swapped out instead)"
    elif config.preemption == "auto":
        how = "swap to the host cache or recompute, whichever is measured to be cheaper (auto)"
    else:
        how = "swap to the host cache; recompute where it has no room"
    return [("schedule", f"{config.schedule} (--schedule)"), ("preemption", how)]
