"""The Python half of the transport: torch's process groups, as ops that the C core calls.

``haloconv::_post`` starts one exchange of one group and returns a ticket, ``_wait`` returns when everything of it
has been received, ``_report`` tells the group that this rank failed. Their bodies are
``torch.distributed.batch_isend_irecv`` and some bookkeeping:

* Every rank of a group counts its exchanges, also those in which it has no message. Each message on the CPU starts
  with that number, its length and the exchange's signature (csrc/halo.c), so a message that is out of step, or meant
  for another width or window, is an error and never a wrong halo.
* A rank that fails sends each other rank a *report*, a header alone. Whoever then waits for that rank raises at once
  instead of waiting for ever, and reports in turn, until all of the group know. A failure also ends the group's
  *epoch*: counting restarts, under another tag, so that nothing left over from before can be taken for a halo. Ranks
  that all failed in the same operation (a wrong argument, say) meet again in the next epoch, and the group goes on.
* Sends are not waited for: their buffers live until a later message of the receiver proves that it has them. So a
  rank that only sends cannot be stalled by a receiver that failed either.

Headers are not read on devices where that would stop the host; there the backend's own error handling applies. A
backend that has no way from device to device, gloo, goes through pinned host memory (_staging.py), with headers.

What is counted for `comm_stats` is counted here, where it happens.
"""

import collections
import ctypes
import itertools
import threading
import time
import warnings
import weakref

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _resolve_process_group

from . import _C, _staging
from ._check import on_rank
from ._staging import CHUNK_BYTES, HEADER_BYTES

_REPORT = -1  # in place of an exchange's number
_FIRST_TAG = 0x48430000  # keeps haloconv's messages apart from a user's own send and recv on the same group
_MAX_REPORTS = 16  # per peer
_MAX_UNPROVEN_SENDS = 64  # per peer, before a send is waited for after all

_library = torch.library.Library("haloconv", "FRAGMENT")
# Text comes as a list of bytes: see hc_stable_from_text in csrc/stable.h.
_library.define(
    "_post(Tensor[] send, int[] to, Tensor[] recv, int[] source, int[] group, int[] op, int signature) -> int"
)
_library.define("_wait(int ticket) -> ()")
_library.define("_report(int[] group, int[] message) -> ()")
_library.define("_connect(int[] group, int device) -> int")


class _Statistics:
    """Counters since the last reset, in all and by op."""

    NAMES = ("messages", "bytes", "exchanges", "all_reduces", "seconds")

    def __init__(self):
        self.by_op = collections.defaultdict(lambda: dict.fromkeys(self.NAMES, 0))

    def add(self, op, **amounts):
        counters = self.by_op[op]
        for name, amount in amounts.items():
            counters[name] += amount

    def totals(self):
        result = {name: sum(counters[name] for counters in self.by_op.values()) for name in self.NAMES}
        result["by_op"] = {op: dict(counters) for op, counters in self.by_op.items()}
        return result


class _Channel:
    """What a rank knows about the exchanges of one process group."""

    def __init__(self, group):
        self._group = weakref.ref(group)  # its own key in _channels
        self.is_gloo = dist.get_backend(group) == "gloo"
        self.epoch = 0
        self.next_exchange = 0
        self.connects = 0  # in this epoch
        self.uses_c10d = False  # for tensors on a device: the ranks have agreed (_nccl.py)
        # By peer, oldest first: (epoch, exchange, work, buffer) of sends, and (epoch, work, buffer) of reports.
        self.sends = collections.defaultdict(collections.deque)
        self.reports = collections.defaultdict(lambda: collections.deque(maxlen=_MAX_REPORTS))

    @property
    def group(self):
        return self._group()

    @property
    def tag(self):
        return _FIRST_TAG + self.epoch

    def hold(self, peer, exchange, work, buffer):
        """Keeps a send alive until its receiver has it."""
        self.sends[peer].append((self.epoch, exchange, work, buffer))
        while len(self.sends[peer]) > _MAX_UNPROVEN_SENDS:
            self._drop_first_send(peer)

    def release(self, peer, epoch, exchange):
        """Forgets the sends that `peer` must have received, since its message of (epoch, exchange) is here."""
        reports, sends = self.reports[peer], self.sends[peer]
        while reports and reports[0][0] < epoch:
            reports.popleft()
        while sends and sends[0][:2] < (epoch, exchange):
            self._drop_first_send(peer)

    def _drop_first_send(self, peer):
        epoch, _, work, _ = self.sends[peer].popleft()
        if epoch == self.epoch:  # of an epoch that has ended nobody may want it any more
            work.wait()


# targets: where what was received in host memory goes to on a device, or None.
_Ticket = collections.namedtuple(
    "_Ticket", "channel epoch exchange op signature checked works recvs peers sends targets"
)

statistics = _Statistics()
_channels = weakref.WeakKeyDictionary()
_tickets = {}
_ticket_numbers = itertools.count(1)
_lock = threading.Lock()  # autograd threads and the main thread may both be here


def _channel(group_name):
    try:
        group = _resolve_process_group(group_name)
    except RuntimeError as error:
        raise RuntimeError(
            f"group is '{group_name}', expected a process group that is alive{on_rank()}"
        ) from error
    channel = _channels.get(group)
    if channel is None:
        channel = _channels[group] = _Channel(group)
    return channel


def _header(buffer):
    """[exchange, length, what the C core marks, signature]."""
    return (ctypes.c_int64 * 4).from_address(buffer.data_ptr())


def _chunks(buffer, cut, receives=False):
    """The pieces in which a buffer travels; for a receive each has room for a whole chunk (csrc/transport.h)."""
    size = buffer.numel()
    if cut and receives:
        buffer = buffer.as_strided((buffer.untyped_storage().nbytes(),), (1,))
    if not cut or size <= CHUNK_BYTES:
        return [buffer]
    return [buffer[begin : begin + CHUNK_BYTES] for begin in range(0, size, CHUNK_BYTES)]


def _start(channel, receives, sends, on_cpu):
    """The works of the transfers, receives first. gloo gives one for each, NCCL one for all."""
    group, tag = channel.group, channel.tag
    if on_cpu and channel.is_gloo:
        # What isend and irecv come down to, without their checks: half of a small exchange's time.
        return [group.recv([chunk], peer, tag) for chunk, peer in receives] + [
            group.send([chunk], peer, tag) for chunk, peer in sends
        ]
    transfers = [(dist.irecv, *item) for item in receives] + [(dist.isend, *item) for item in sends]
    operations = [
        dist.P2POp(function, chunk, group=group, group_peer=peer, tag=tag)
        for function, chunk, peer in transfers
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def _post(send, to, recv, source, group_name, op, signature):
    started = time.perf_counter()
    with _lock:
        channel = _channel(group_name)
        exchange, channel.next_exchange = channel.next_exchange, channel.next_exchange + 1
        targets = None
        buffers = (*send, *recv)
        if _staging.is_needed(buffers, channel.group):
            send, recv, targets = _staging.to_host(send), _staging.rooms(recv), recv
            on_cpu = True
        else:
            on_cpu = all(buffer.is_cpu for buffer in buffers)
        if on_cpu:
            for buffer in send:
                header = _header(buffer)
                header[:2] = (exchange, buffer.numel())
                header[3] = signature
        receives = [
            (chunk, peer) for b, peer in zip(recv, source) for chunk in _chunks(b, on_cpu, receives=True)
        ]
        sends = [(chunk, peer) for b, peer in zip(send, to) for chunk in _chunks(b, on_cpu)]
        works = _start(channel, receives, sends, on_cpu)
        if on_cpu and len(works) == len(receives) + len(sends):
            for work, (chunk, peer) in zip(works[len(receives) :], sends):
                channel.hold(peer, exchange, work, chunk)
            works = works[: len(receives)]
        ticket = next(_ticket_numbers)
        _tickets[ticket] = _Ticket(
            channel, channel.epoch, exchange, op, signature, on_cpu, works, recv, source, send, targets
        )
        statistics.add(
            op,
            messages=len(send),
            bytes=sum(buffer.numel() for buffer in send) - HEADER_BYTES * len(send) * on_cpu,
            exchanges=1 if (sends or receives) and op != "all_reduce" else 0,
            all_reduces=1 if (sends or receives) and op == "all_reduce" else 0,
            seconds=time.perf_counter() - started,
        )
    return ticket


def _wait(ticket_number):
    started = time.perf_counter()
    with _lock:
        ticket = _tickets.pop(ticket_number)
    try:
        works = iter(ticket.works)
        if ticket.checked:
            for buffer, peer in zip(ticket.recvs, ticket.peers):
                next(works).wait()  # the first chunk says what follows
                _check_header(ticket, buffer, peer)
                for _ in range(CHUNK_BYTES, buffer.numel(), CHUNK_BYTES):
                    next(works).wait()
                ticket.channel.release(peer, ticket.epoch, ticket.exchange)
        for work in works:
            work.wait()
        if ticket.targets is not None:
            _staging.to_device(ticket.recvs, ticket.targets)
    except RuntimeError as error:
        raise RuntimeError(
            f"exchange {ticket.exchange} ({ticket.op}) with ranks {ticket.peers} of group "
            f"'{ticket.channel.group.group_name}' failed: {error}"
        ) from error
    finally:
        statistics.add(ticket.op, seconds=time.perf_counter() - started)


def _check_header(ticket, buffer, peer):
    exchange, length, _, signature = _header(buffer)
    if exchange == _REPORT:
        raise RuntimeError(f"rank {peer} reported: {_reported(ticket.channel, peer)}")
    if exchange != ticket.exchange:
        raise RuntimeError(f"rank {peer} is at exchange {exchange}: the ranks do not run the same operations")
    if length != buffer.numel():
        raise RuntimeError(
            f"rank {peer} sent {length} bytes, expected {buffer.numel()}: the ranks disagree on a shape, a dtype or "
            "a window"
        )
    if signature != ticket.signature:
        raise RuntimeError(
            f"rank {peer} sent the {length} bytes that were expected, but as part of another operation: the ranks "
            "disagree on an op, the tensor's size, its dtype or a window"
        )


def _store_key(channel, rank):
    return f"haloconv/{channel.group.group_name}/{rank}"


def failed_key(channel, epoch):
    """Where the ranks of a group leave word that one of them failed: for those that wait for a device, not for a
    message (_nccl.py). How many exchanges it had posted there, and a sentence."""
    first = dist.get_process_group_ranks(channel.group)[0]
    return f"haloconv/{channel.group.group_name}/{first}/{epoch}/failed"


def _leave_word(channel, epoch, posted, sentence):
    """The word of the rank that had posted least stays; that of epochs long over goes."""
    store, key, before = _get_default_store(), failed_key(channel, epoch), ""
    while before == "" or int(before.partition(" ")[0]) > posted:
        found = store.compare_set(key, before, f"{posted} {sentence}").decode()
        if found == f"{posted} {sentence}":
            break
        before = found
    if epoch >= _MAX_REPORTS:
        store.delete_key(failed_key(channel, epoch - _MAX_REPORTS))


def _reported(channel, peer):
    try:
        return _get_default_store().get(_store_key(channel, peer)).decode()
    except RuntimeError as error:  # the text is a help, no more
        return f"an error, whose text could not be read ({error})"


def report(group_name, message):
    """Ends the epoch of a group. Never raises: it runs while another error is on its way."""
    try:
        posted = _C.nccl_close_failed(group_name)
        with _lock:
            channel = _channel(group_name)
            group, tag, epoch = channel.group, channel.tag, channel.epoch
            channel.epoch += 1
            channel.next_exchange = channel.connects = 0
        rank = dist.get_rank(group)
        if dist.get_world_size(group) == 1:  # nobody waits
            return
        _get_default_store().set(_store_key(channel, rank), message)
        _leave_word(channel, epoch, posted, f"rank {rank} reported: {message}")
        for peer in range(dist.get_world_size(group)):
            if peer != rank and channel.is_gloo:
                buffer = torch.empty(HEADER_BYTES, dtype=torch.uint8)
                _header(buffer)[:2] = (_REPORT, HEADER_BYTES)
                work = dist.isend(buffer, group=group, group_dst=peer, tag=tag)
                channel.reports[peer].append((epoch, work, buffer))
    except Exception as error:
        warnings.warn(f"haloconv could not report an error to group '{group_name}': {error}", stacklevel=2)


class reporting:
    """A block whose errors reach the ranks that would wait for this one: for checks of arguments, before anything is
    sent. `groups` returns the names of their groups; it is called only for an error."""

    def __init__(self, groups):
        self.groups = groups

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if kind is not None:
            error._haloconv_reported = True
            for name in self.groups():
                report(name, str(error))
        return False


def _text(codes):
    return bytes(codes).decode(errors="replace")


def _post_op(send, to, recv, source, group, op, signature):
    return _post(send, to, recv, source, _text(group), _text(op), signature)


def _report_op(group, message):
    report(_text(group), _text(message))


_library.impl("_post", _post_op, "CompositeExplicitAutograd")
_library.impl("_wait", _wait, "CompositeExplicitAutograd")
_library.impl("_report", _report_op, "CompositeExplicitAutograd")


def comm_stats():
    """What this process has communicated since the last reset.

    Returns:
        A dict: ``messages`` and ``bytes`` sent (payload, headers left out), ``exchanges`` and ``all_reduces`` taken
        part in, ``seconds`` spent posting and waiting, and ``by_op`` with the same numbers for each operation. Bytes of
        an all-reduce are those of its tensor.
    """
    for op, messages, sent, exchanges, seconds in _C.nccl_counts():
        kind = "all_reduces" if op == "all_reduce" else "exchanges"
        statistics.add(op, messages=messages, bytes=sent, seconds=seconds, **{kind: exchanges})
    _C.nccl_reset_counts()
    return statistics.totals()


def reset_comm_stats():
    """Sets all counters to zero."""
    statistics.by_op.clear()
    _C.nccl_reset_counts()
