"""Who holds each block of each tier, which are free, which are cached, and what must be moved.

    id:     0 .. N-1      N .. N+H-1     N+H .. N+H+D-1
    tier:   device        host           disk
    count:  2 1 0 0       0 1 0          0 0
            | | | free    | | free       cached
            | | cached    | held by a suspended sequence
            | held        cached

    device --evict--> host --evict--> disk --evict--> gone        each tier's policy names the victim
    device <---------hit----------------+

A block is free (on its tier's list), held (count > 0), or cached (count 0 and published in the tree, known
to its tier's policy). Evicting a block moves it to the next tier that can take it, as the same node of
the tree; where none can, it is dropped with everything below it. What is to be moved waits in
`transfers`, in order, and what is to be copied in `copies`, until drain().
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.kv.eviction import LRU, EvictionPolicy, Expiring
from octavo.kv.tree import PrefixTree
from octavo.kv.types import TOKEN_BYTES, Copy, Drop, Event, Move, Place, Record, Tier, TierStats


class Blocks:
    """The physical state of all tiers. Every operation is O(1) or O(log n) per block concerned.

    sizes: slots of device, host and disk. policy: the device's eviction order. record_events: keep
    Events in `events` for the caller to take.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        block_size: int,
        policy: EvictionPolicy,
        *,
        record_events: bool = False,
    ) -> None:
        device, host, disk = sizes
        self.sizes = sizes
        self.bases = (0, device, device + host)
        total = device + host + disk
        self.num_device = device
        self.has_lower = host + disk > 0
        self.key_bytes = block_size * TOKEN_BYTES
        self.tree = PrefixTree(total)
        self.refs: list[int] = [0] * total
        self.uses: list[int] = [0] * total
        self.priority: list[int] = [0] * total
        # Stacks: the slot given back last is the warmest.
        self.free: tuple[list[int], ...] = tuple(
            list(range(base + size - 1, base - 1, -1)) for base, size in zip(self.bases, sizes, strict=True)
        )
        lower = [Expiring(LRU(), policy.ttl) if isinstance(policy, Expiring) else LRU() for _ in sizes[1:]]
        self.policies: tuple[EvictionPolicy, ...] = (policy, *lower)
        self.transfers: list[Move | Drop] = []
        self.copies: dict[int, Copy] = {}  # by dst; each holds a reference on its src until drain()
        self.pins: dict[int, int] = {}  # src -> how many of its references are such copies
        self.events: list[Event] = []
        self.record_events = record_events
        self.evictions = self.demotions = self.promotions = self.num_copies = self.merges = 0

    # -- reading -------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Device blocks that allocate() could take: free + cached."""
        return len(self.free[0]) + len(self.policies[0])

    def tier(self, block: int) -> Tier:
        """The tier of an id."""
        return Tier.DEVICE if block < self.bases[1] else Tier.HOST if block < self.bases[2] else Tier.DISK

    def place(self, block: int) -> Place:
        """Tier and slot of an id."""
        tier = self.tier(block)
        return Place(tier, block - self.bases[tier])

    def sharers(self, block: int) -> int:
        """Sequences that hold `block`. Copies to be made from it do not count: they read it before
        the forward pass writes, and only slots that nobody will write."""
        return self.refs[block] - self.pins.get(block, 0)

    def room(self, tier: Tier) -> int:
        """Slots of a tier that could be taken: free + cached."""
        return len(self.free[tier]) + len(self.policies[tier])

    def tier_stats(self, tier: Tier) -> TierStats:
        """Slots of a tier by state."""
        slots, free, cached = self.sizes[tier], len(self.free[tier]), len(self.policies[tier])
        return TierStats(slots, free, slots - free - cached, cached)

    # -- holding -------------------------------------------------------------------------------

    def hold(self, block: int, priority: int = 0, *, use: bool = True) -> None:
        """One holder more. use: count it as a use; not where the sequence had the tokens already, so
        that a block never counts more uses than what leads to it."""
        if self.refs[block] == 0:
            self.policies[0 if block < self.num_device else self.tier(block)].remove(block)
        self.refs[block] += 1
        self.uses[block] += use
        if priority > self.priority[block]:
            self.priority[block] = priority

    def release(self, block: int) -> None:
        """One holder fewer; the last one leaves the block cached if published, else free."""
        refs = self.refs[block] - 1
        self.refs[block] = refs
        if refs == 0:
            if self.tree.key[block] is not None:
                self.cache(block)
            else:
                self._discard(block)

    def release_all(self, blocks: Iterable[int]) -> None:
        """release() for each of some device blocks, in order."""
        policy = self.policies[0]
        if not isinstance(policy, LRU):
            for block in blocks:
                self.release(block)
            return
        refs, keys, full = self.refs, self.tree.key, self.key_bytes
        cached = []
        for block in blocks:
            left = refs[block] - 1
            refs[block] = left
            if left == 0:
                key = keys[block]
                if key is None:
                    self._discard(block)
                elif len(key) == full:
                    cached.append(block)
                else:
                    policy.add(block, partial=True)
        policy.add_full(cached)

    def cache(self, block: int) -> None:
        """A published block that nobody holds can be evicted from now on."""
        policy = self.policies[0 if block < self.num_device else self.tier(block)]
        key = self.tree.key[block]
        partial = key is not None and len(key) < self.key_bytes
        policy.add(block, self.uses[block], self.priority[block], partial)

    def _discard(self, block: int) -> None:
        """Free an unpublished block that nobody holds, and drop a copy still due to it."""
        if self.copies and (copy := self.copies.pop(block, None)) is not None:
            self.pins[copy.src] -= 1
            self.release(copy.src)
        if block < self.num_device:
            self.free[0].append(block)
            return
        tier = self.tier(block)
        if tier is Tier.DISK:
            self.transfers.append(Drop(self.place(block)))
        self.free[tier].append(block)

    def allocate(self, count: int, priority: int = 0) -> list[int]:
        """Take `count` device blocks, evicting as needed. The caller has checked `available`."""
        free = self.free[0]
        policy = self.policies[0]
        while len(free) < count:
            self.evict(policy.victim())
        taken = free[len(free) - count :][::-1]
        del free[len(free) - count :]
        refs, uses, important = self.refs, self.uses, self.priority
        for block in taken:
            refs[block] = uses[block] = 1
            important[block] = priority
        return taken

    # -- publishing ----------------------------------------------------------------------------

    def publish(self, block: int, parent: int, key: bytes) -> None:
        """Make `block` findable under `parent`, or with more tokens than before."""
        if self.tree.key[block] is None:
            self.tree.publish(block, parent, key)
        else:
            self.announce("removed", block)
            self.tree.rekey(block, key)
        self.announce("stored", block)

    def publish_chain(self, blocks: Sequence[int], parent: int, keys: Sequence[bytes]) -> None:
        """Make unpublished `blocks` findable, each after the one before, the first after `parent`, which
        nothing continues yet."""
        self.tree.publish_chain(blocks, parent, keys)
        if self.record_events:
            for block in blocks:
                self.announce("stored", block)

    def merge(self, block: int, equal: int, priority: int) -> None:
        """A sequence gives up `block` for `equal`, which holds the same tokens."""
        self.hold(equal, priority, use=False)
        self.merges += 1
        if self.refs[block] == 1 and self.tree.key[block] is not None:
            self._unpublish(block)  # it was published with fewer of the same tokens
        self.release(block)

    def cut_back(self, block: int, keep: bytes) -> None:
        """Publish `block` with the tokens of `keep` only, so that its one holder may write behind them."""
        for child in self.tree.children(block)[::-1]:
            self.drop(child)
        parent = self.tree.parent(block)
        self._unpublish(block)
        if not self.tree.covers(parent, keep):
            self.publish(block, parent, keep)

    def _unpublish(self, block: int) -> None:
        self.announce("removed", block)
        self.tree.unpublish(block)

    def drop(self, block: int) -> None:
        """A node and all below it can be found no more: free where nobody holds them, else private."""
        order = [block]
        for node in order:
            order += self.tree.children(node)
        for node in reversed(order):
            self._unpublish(node)
            if self.refs[node] == 0:
                tier = self.tier(node)
                self.policies[tier].remove(node)
                self.evictions += tier is Tier.DEVICE
                self._discard(node)

    # -- tiers ---------------------------------------------------------------------------------

    def evict(self, block: int) -> None:
        """Free a cached block: it goes on in a lower tier, or nowhere."""
        if not self.has_lower and not self.tree.has_children(block):  # the usual case, made quick
            self.policies[0].remove(block)
            self._unpublish(block)
            self.evictions += 1
            self.free[0].append(block)
            return
        tier = self.tier(block)
        low = self._lower_slot(tier)
        if self.tree.key[block] is None:  # making room below dropped an ancestor, and this along
            if low >= 0:
                self.free[self.tier(low)].append(low)
            return
        if low < 0:
            self.drop(block)
            return
        self.policies[tier].remove(block)
        self.evictions += tier is Tier.DEVICE
        self.demotions += 1
        self.relocate(block, low)
        self.cache(low)
        self.free[tier].append(block)

    def _lower_slot(self, tier: Tier) -> int:
        """A slot in the next tier down that has or can make one; -1 if none."""
        for low in (Tier.HOST, Tier.DISK):
            if low > tier and self.room(low):
                return self.take_slot(low)
        return -1

    def take_slot(self, tier: Tier) -> int:
        """A slot of a lower tier, evicting its victim if need be. The caller has checked room()."""
        if not self.free[tier]:
            self.evict(self.policies[tier].victim())
        return self.free[tier].pop()

    def relocate(self, block: int, to: int) -> None:
        """A published block goes on, bytes and node, as the id `to` of a lower tier."""
        self.announce("removed", block)
        self.tree.move(block, to)
        self.uses[to], self.priority[to] = self.uses[block], self.priority[block]
        self.transfer(block, to)
        self.announce("stored", to)

    def fetch(self, block: int, to: int, key: bytes) -> None:
        """Bring a held block of a lower tier to device block `to`, for a holder that has `key` of it.

        A node goes along when those are all its tokens; else it stays where it lies, and `to` is a
        private copy. The holder's reference on `block` is given up, that on `to` is the caller's.
        """
        self.promotions += 1
        if self.tree.key[block] == key:
            self.announce("removed", block)
            self.tree.move(block, to)
            self.uses[to] = self.uses[block]
            self.priority[to] = max(self.priority[to], self.priority[block])
            self.announce("stored", to)
        self.transfer(block, to)
        self.release(block)

    def supersede(self, equal: int, block: int) -> None:
        """The node `equal`, in a lower tier, goes on as the device block `block`, which has its tokens."""
        if self.tree.key[block] is not None:
            self._unpublish(block)  # it was published with fewer of the same tokens
        self.announce("removed", equal)
        self.tree.move(equal, block)
        self.announce("stored", block)
        if self.refs[equal] == 0:
            self.policies[self.tier(equal)].remove(equal)
            self._discard(equal)

    def transfer(self, src: int, dst: int) -> None:
        """Have the bytes moved before the next forward pass, after everything queued so far."""
        place = self.place(dst)
        record = self.record(dst) if place.tier is Tier.DISK else None
        self.transfers.append(Move(self.place(src), place, record))

    def record(self, block: int) -> Record:
        """What a store writes beside the bytes of a published block."""
        tree, key = self.tree, self.tree.key[block]
        assert key is not None
        return Record(tree.uid(block), tree.uid(tree.parent(block)), tree.scope(block), key)

    # -- copies --------------------------------------------------------------------------------

    def queue_copy(self, src: int, dst: int, num_slots: int) -> None:
        """Copy before the next forward. The caller's reference on `src` passes to the copy.

        A source that itself still waits to be filled is bypassed, so that copies stay independent:
        nothing was committed in it since, so its first `num_slots` are those of its own source.
        """
        due = self.copies.get(src)
        if due is not None:
            self.hold(due.src, use=False)
            self.release(src)
            src = due.src
        self.copies[dst] = Copy(src, dst, num_slots)
        self.pins[src] = self.pins.get(src, 0) + 1
        self.num_copies += 1

    def take_copies(self) -> tuple[Copy, ...]:
        """The copies due, no longer pinning their sources."""
        copies = tuple(self.copies.values())
        self.copies.clear()
        self.pins.clear()
        for copy in copies:
            self.release(copy.src)
        return copies

    def announce(self, kind: str, block: int) -> None:
        """Record that a published block was "stored" where it is, or will be "removed" from there."""
        if self.record_events:
            tree, key = self.tree, self.tree.key[block]
            assert key is not None
            uid, parent = tree.uid(block), tree.uid(tree.parent(block))
            tokens = key if kind == "stored" else b""
            self.events.append(Event(kind, self.tier(block), uid, parent, tree.scope(block), tokens))
