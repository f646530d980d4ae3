"""What the trainer's senders have said and done in one update, and what they owe. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from rolloutfleet.agent.errors import invalid
from rolloutfleet.agent.preflight import compare_tensors, compare_whole
from rolloutfleet.api.agent import BeginUpdate, SendBucket, SenderDone, TensorMeta
from rolloutfleet.engine.checkpoint import Checkpoint, missing


class Senders:
    def __init__(self, first: BeginUpdate) -> None:
        """`first`: the request that began the update."""
        self._wanted = first.senders
        self._each_to_its_own = first.transport == "tensor"
        self.reference: Checkpoint | None = None
        """The served model, where a checkpoint of it is seen."""
        self._joined: dict[int, float] = {}
        """When each has begun, by the monotonic clock."""
        self._held: set[int] = set()
        """Those whose lines are held open."""
        self._announced: dict[int, list[str]] = {}
        """Names of tensors by sender that has said what it will send."""
        self._numbers: defaultdict[int, set[int]] = defaultdict(set)
        """Of buckets by sender."""
        self._sent: defaultdict[str, set[str]] = defaultdict(set)
        """Names of tensors by engine's UID."""
        self._done: dict[int, int] = {}
        """Bytes by sender that is done."""

    # What they say

    def join(self, request: BeginUpdate, *, now: float) -> None:
        """Also the second time. Raises AgentError for tensors that the served model does not have."""
        self._joined.setdefault(request.sender, now)
        if request.tensors is not None:
            self._announced[request.sender] = [tensor.name for tensor in request.tensors]
            self.compare(request.tensors)

    def hold(self, sender: int) -> None:
        self._held.add(sender)

    def number(self, request: SendBucket) -> None:
        """Raises AgentError for a bucket that was announced before."""
        if request.number in self._numbers[request.sender]:
            raise invalid("BadRequest", f"number: bucket {request.number} of sender {request.sender} is there already")
        self._numbers[request.sender].add(request.number)

    def sent(self, tensors: Sequence[TensorMeta], engines: Iterable[str]) -> None:
        """To the engines of these UIDs."""
        for uid in engines:
            self._sent[uid].update(tensor.name for tensor in tensors)

    def finish(self, request: SenderDone) -> None:
        self._done[request.sender] = request.bytes

    # What follows

    def has_joined(self, sender: int) -> bool:
        return sender in self._joined

    @property
    def all_joined(self) -> bool:
        return len(self._joined) == self._wanted

    @property
    def all_done(self) -> bool:
        return len(self._done) == self._wanted

    def silent(self, *, since: float) -> list[int]:
        """Those that had begun by then and do not hold their line."""
        return [sender for sender, joined in self._joined.items() if sender not in self._held and joined < since]

    def compare(self, tensors: Sequence[TensorMeta]) -> None:
        """Raises AgentError for a tensor that the served model does not have in this shape."""
        compare_tensors(self.reference, tensors)

    def compare_announced(self) -> None:
        """Raises AgentError when senders that have all said what they will send leave something out."""
        if len(self._announced) < self._wanted:
            return
        if self._each_to_its_own:
            for names in self._announced.values():
                compare_whole(self.reference, names)
        else:
            compare_whole(self.reference, {name for names in self._announced.values() for name in names})

    def lacking(self, uid: str) -> list[str]:
        """Tensors that nobody has sent to this engine: it keeps the old ones."""
        had = self._sent[uid]
        if self.reference is not None:
            return missing(self.reference, had)
        return sorted(set().union(*self._sent.values()) - had)

    @property
    def bytes(self) -> int:
        """To each engine: of the distributed transport from all senders, of the tensor transport from its own."""
        sent = self._done.values()
        return max(sent, default=0) if self._each_to_its_own else sum(sent)
