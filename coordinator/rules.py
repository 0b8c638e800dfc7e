"""What of a run file the core goes by, with the amendments in force."""

from collections.abc import Iterable

from coordinator.presets.cost import CODEC_COSTS
from coordinator.swarm.state import Rules
from protocol.run.amendments import in_force, schedule_of
from protocol.run.models import layout_of
from protocol.run.run_spec import RunSpec
from protocol.run.schedule import Schedule
from protocol.trust.rulings import Ruling

SLICE_BYTES = 1 << 20
"""Of a contribution: a tenth of a second at 100 Mbit/s, many times what a slice costs in messages."""


def rules_in_force(run: RunSpec, rulings: Iterable[Ruling]) -> Rules:
    """What the core goes by after all rulings. Raises ConfigError as in_force does."""
    rulings = tuple(rulings)
    return rules_of(in_force(run, rulings), began=run, schedule=schedule_of(run, rulings))


def rules_of(
    run: RunSpec, *, began: RunSpec | None = None, schedule: Schedule | None = None
) -> Rules:
    """What of the run file the core goes by; `began`: without amendments, where there are some.

    Nodes say which codecs the run began with: of those in force they hear when they attach.
    """
    return Rules(
        total_rounds=run.run.rounds,
        min_nodes=run.run.min_nodes,
        inner_steps=run.node_steps,
        round_steps=run.round_steps,
        schedule=schedule or Schedule.of(began or run),
        batch=run.inner.batch,
        context=run.model.context,
        train_seconds=run.deadlines.train,
        contribute_seconds=run.deadlines.contribute,
        commit_seconds=run.deadlines.commit,
        apply_seconds=run.deadlines.apply,
        lease_seconds=run.deadlines.lease,
        adapts_deadlines=run.deadlines.adapt,
        floor_seconds=run.deadlines.floor,
        has_overlap=run.exchange.overlap != "none",
        evaluate_every_rounds=run.evaluation.every_rounds,
        num_prompts=len(run.evaluation.prompts),
        first_digest=run.first_digest,
        watches_loss=run.evaluation.go_back,
        bounds_results=run.outer.screening,
        audited_share=run.outer.audit,
        has_private_data=run.data.private,
        compares_samples=run.description is not None and run.description.compares_samples,
        slice_elements=int(8 * SLICE_BYTES / CODEC_COSTS[run.exchange.uplink].bits),
        layout=layout_of(run).summary(),
        codecs=(began or run).exchange.codecs,
        tokens_before=run.beginning.tokens,
        trained_before=run.beginning.trained,
    )
