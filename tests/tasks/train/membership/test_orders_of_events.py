"""For any events in any order, the laws of membership hold, and the training ends."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from simulated_ranks import Process, SimulatedRanks, policy

from trainwright.tasks.train.membership import event

DEVICE = st.integers(0, 3)
HANGS = st.sampled_from(["silent", "computes", "idle", "deaf"])


class AnyOrder(RuleBasedStateMachine):
    """Ranks that load, train, leave, hang, fail and die, hosts that come and go, and a stop.

    `SimulatedRanks` checks each instruction. Finally, without new failures, the training must end:
    with its last step, or with an error.
    """

    ranks: SimulatedRanks

    @initialize(
        count=st.integers(1, 4),
        min_count=st.integers(1, 3),
        searches=st.booleans(),
        local=st.booleans(),
        restarts=st.integers(0, 3),
        patience_s=st.sampled_from([0.0, 60.0]),
        begun=st.sampled_from([0, 5]),
        rounds=st.sampled_from([5, 5, 5, 0]),
        whole=st.booleans(),
        least_for_layout=st.sampled_from([0, 0, 1, 2, 3]),
    )
    def begin(
        self,
        count: int,
        min_count: int,
        searches: bool,
        local: bool,
        restarts: int,
        patience_s: float,
        begun: int,
        rounds: int,
        whole: bool,
        least_for_layout: int,
    ) -> None:
        chosen = policy(
            count,
            min_count=min(min_count, count),
            searches=searches,
            local=local,
            restarts=restarts,
            wait_for_devices=patience_s,
            whole=whole,
            staged=least_for_layout > 0,
        )
        self.ranks = SimulatedRanks(chosen, checkpoint_step=0 if searches else begun)
        self.ranks.least_for_layout = least_for_layout
        self.ranks.tick()
        self.all_do_what_they_can(rounds)

    def process(self, device: int) -> Process | None:
        return self.ranks.processes.get(device % self.ranks.count)

    def running(self) -> bool:
        return self.ranks.end is None

    # -- what goes well ----------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.05, 1.0, 3.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.ranks.tick(seconds)

    @precondition(running)
    @rule(device=DEVICE, count=st.sampled_from([None, 1]))
    def a_report_arrives(self, device: int, count: int | None) -> None:
        if one := self.process(device):
            self.ranks.deliver(one, count)

    @precondition(running)
    @rule(rounds=st.integers(1, 5))
    def all_do_what_they_can(self, rounds: int) -> None:
        for _ in range(rounds):
            if self.ranks.end is None:
                self.ranks.act()
                self.ranks.train()
                self.ranks.tick()

    @precondition(running)
    @rule(device=DEVICE)
    def a_rank_loads_or_joins(self, device: int) -> None:
        one = self.process(device)
        if one is None or one.hang is not None or one.killed is not None:
            return
        if one.status == "loading":
            self.ranks.load(one)
        elif one.status == "joining" and self.ranks.healthy():
            self.ranks.join(one)

    @precondition(running)
    @rule()
    def a_step_is_made(self) -> None:
        if not self.ranks.policy.searches:
            self.ranks.train()

    @precondition(running)
    @rule()
    def a_checkpoint_is_stored(self) -> None:
        if self.ranks.joined():
            self.ranks.store_checkpoint()

    @precondition(running)
    @rule()
    def the_spare_loads(self) -> None:
        if self.ranks.spare == "loading":
            self.ranks.spare = "loaded"
            self.ranks.tell(event.SpareLoaded(self.ranks.now))

    @precondition(running)
    @rule()
    def a_checkpoint_is_restored(self) -> None:
        if self.ranks.restore_asked:
            self.ranks.restore()

    @precondition(running)
    @rule()
    def a_layout_is_planned(self) -> None:
        if self.ranks.layout_asked:
            self.ranks.plan_layout()

    # -- what goes wrong ---------------------------------------------------------------------------

    @precondition(running)
    @rule(device=DEVICE, out_of_memory=st.booleans(), sent=st.booleans())
    def a_process_dies(self, device: int, out_of_memory: bool, sent: bool) -> None:
        if one := self.process(device):
            one.outbox = one.outbox if sent else []
            self.ranks.die(one, out_of_memory=out_of_memory)

    @precondition(running)
    @rule(device=DEVICE, odd=st.integers(0, 9))
    def the_code_fails(self, device: int, odd: int) -> None:
        one = self.process(device)
        if one is not None and (one.status == "in" or odd == 0):
            self.ranks.fail(one, final=odd == 1)

    @precondition(running)
    @rule(device=DEVICE, how=HANGS)
    def a_rank_hangs(self, device: int, how: str) -> None:
        one = self.process(device)
        if one is None or one.hang is not None:
            return
        inside = [other for other in self.ranks.inside() if other.hang is None]
        if one.status == "loading" and how == "silent":
            one.hang = "silent"
        elif one in inside and (how != "idle" or len(inside) > 1):
            # The watchdog misses a rank that hangs alone, outside a step, and sends heartbeats.
            one.hang, one.since = how, None  # type: ignore[assignment]  # one of them

    @precondition(running)
    @rule(device=DEVICE)
    def a_rank_notices_that_another_is_gone(self, device: int) -> None:
        one = self.process(device)
        if one in self.ranks.inside() and one.hang is None and not self.ranks.healthy():
            self.ranks.leave(one, sum_error="connection reset")

    @precondition(running)
    @rule()
    def sums_fail_and_no_rank_is_lost(self) -> None:
        if self.ranks.healthy():
            for one in self.ranks.inside():
                self.ranks.leave(one, sum_error="no route")

    @precondition(running)
    @rule(device=DEVICE, fits=st.integers(0, 8))
    def a_rank_runs_out_of_memory(self, device: int, fits: int) -> None:
        one = self.process(device)
        batch = self.ranks.split[device % self.ranks.count]
        if one is not None and one.status == "in" and one.hang is None and batch > 0:
            self.ranks.leave(one, shortage=event.MemoryShortage(batch, min(fits, batch - 1)))

    @precondition(running)
    @rule()
    def the_spare_dies(self) -> None:
        if self.ranks.spare != "none":
            self.ranks.spare = "none"
            self.ranks.tell(event.SpareEnded(self.ranks.now))

    @precondition(running)
    @rule(device=DEVICE)
    def a_host_is_lost(self, device: int) -> None:
        number = device % self.ranks.count
        if self.ranks.policy.devices[number].local or number in self.ranks.unreachable:
            return
        self.ranks.unreachable.add(number)
        self.ranks.tell(event.HostsLost(self.ranks.now, frozenset({number})))
        if self.ranks.end is None and (one := self.ranks.processes.get(number)):
            self.ranks.die(one, "is lost")

    @precondition(running)
    @rule(device=DEVICE)
    def a_cluster_takes_a_host_back(self, device: int) -> None:
        number = device % self.ranks.count
        if not self.ranks.policy.devices[number].local and number not in self.ranks.unreachable:
            self.ranks.tell(event.HostsEnding(self.ranks.now, frozenset({number})))

    @precondition(running)
    @rule(device=DEVICE)
    def a_host_returns(self, device: int) -> None:
        number = device % self.ranks.count
        if number in self.ranks.unreachable:
            self.ranks.unreachable.remove(number)
            self.ranks.tell(event.HostsReturned(self.ranks.now, frozenset({number})))

    # -- the end -----------------------------------------------------------------------------------

    @precondition(running)
    @rule(odd=st.integers(0, 9))
    def a_stop_is_asked_for(self, odd: int) -> None:
        if odd == 0 and self.ranks.stop_asked_at is None:
            self.ranks.stop_asked_at = self.ranks.now
            self.ranks.tell(event.StopRequested(self.ranks.now))

    def teardown(self) -> None:
        if hasattr(self, "ranks"):
            self.ranks.play_fairly()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
