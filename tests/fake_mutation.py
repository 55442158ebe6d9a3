"""Takes the NCCL transport's safeguards away, one at a time, and checks that the stand-in (tests/fakes/) notices.

    python tests/fake_mutation.py [--only NAME ...] [--list] [--verbose]

Each mutant is a copy of the working tree with one piece of text replaced, built with the stand-in and tested by a part
of tests/test_transport_nccl.py. A mutant survives, and this script fails, when those tests pass. It also fails when a
mutant's text isn't in the source any more: then the mutant has to follow the source.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import fakebuild
import mutation

POST, COMM = "csrc/transport_nccl.c", "csrc/nccl_comm.c"
EXCHANGES = "test_exchanges and 2"
FAULTS = "test_every_call_may_fail and (2-0 or 3-1)"


class Mutant(NamedTuple):
    name: str
    what: str
    file: str
    old: str
    new: str
    select: str = EXCHANGES  # for pytest -k
    limit: str = "3"  # seconds after which the stand-in itself reports a deadlock


MUTANTS = [
    Mutant(
        "no-ready-record",
        "nothing says when the buffers are filled",
        POST,
        "  HC_TRY_CUDA(api, status, cudaEventRecord(flight->ready, flight->current));\n",
        "",
    ),
    Mutant(
        "no-ready-wait",
        "the sends don't wait for filled buffers",
        POST,
        "  HC_TRY_CUDA(api, status, cudaStreamWaitEvent(comm->stream, flight->ready, 0));\n",
        "",
    ),
    Mutant(
        "no-done-record",
        "nothing says when everything has travelled",
        POST,
        "  HC_TRY_CUDA(api, status, cudaEventRecord(flight->done, comm->stream));\n",
        "",
    ),
    Mutant(
        "no-done-wait",
        "the caller's stream doesn't wait for what it receives",
        POST,
        "  HC_TRY_CUDA(api, &waiting, cudaStreamWaitEvent(flight->current, flight->done, 0));\n",
        "",
    ),
    Mutant(
        "a-receive-less",
        "the last receive of an exchange is left out",
        POST,
        "for (int64_t i = 0; i < recvs->count; ++i) {",
        "for (int64_t i = 0; i + 1 < recvs->count; ++i) {",
    ),
    Mutant(
        "a-send-less",
        "the first send of an exchange is left out",
        POST,
        "for (int64_t i = 0; i < sends->count; ++i) {",
        "for (int64_t i = 1; i < sends->count; ++i) {",
    ),
    Mutant(
        "not-settled",
        "the stream goes on before NCCL has put its work there",
        POST,
        "  HC_TRY(hc_comm_settle(comm, what, status)); /* what follows on the stream must follow the group */\n",
        "  (void)what;\n",
    ),
    Mutant(
        "sends-not-held",
        "nobody but the caller keeps the buffers that are sent",
        POST,
        "  HC_TRY(hold(flight, sends, status));\n",
        "",
        "test_buffers_live and 2",
    ),
    Mutant(
        "released-at-once",
        "the references are given up before the caller's stream waits",
        POST,
        "  const hc_nccl_api *api = NULL;\n  hc_comm *comm = flight->comm;\n",
        "  const hc_nccl_api *api = NULL;\n  hc_comm *comm = flight->comm;\n"
        "  for (int64_t i = 0; i < flight->nheld; ++i) {\n    hc_tensor_free(&flight->held[i]);\n  }\n",
        "test_buffers_live and 2",
    ),
    Mutant(
        "no-group",
        "sends and receives are not one group",
        POST,
        "  HC_TRY_NCCL(api, status, comm->comm, ncclGroupStart());\n  open = true;\n",
        "  open = false;\n",
    ),
    Mutant(
        "failed-post-not-aborted",
        "a post that fails lets its buffers go while they may be in use",
        POST,
        "    hc_comm_abort(comm, capturing, status); /* before the buffers can go */\n",
        "    (void)capturing;\n",
        FAULTS,
    ),
    Mutant(
        "failed-wait-not-aborted",
        "a wait that fails lets its buffers go while they may be in use",
        POST,
        "    hc_comm_abort(comm, flight->captured, &waiting); /* nothing is in flight any more */\n",
        "",
        FAULTS,
    ),
    Mutant(
        "not-drained",
        "after an abort the stream isn't waited for",
        COMM,
        'api->cudaStreamSynchronize(comm->stream), "cudaStreamSynchronize")',
        'cudaSuccess, "cudaStreamSynchronize")',
        FAULTS,
    ),
    Mutant(
        "wait-does-not-ask",
        "a wait doesn't look whether the exchange has failed",
        POST,
        "    (void)hc_comm_check(comm, flight->serial, flight->number, status);\n",
        "",
        "test_nccls_own_errors or test_one_rank_is_refused",
    ),
    Mutant(
        "given-up-counts",
        "an exchange that was given up counts as posted",
        COMM,
        "      comm->exchanges = flight->number - 1;\n",
        "",
        "test_a_timeout_reaches_all_ranks",
        "60",
    ),
    Mutant(
        "mark-without-header",
        "a sender packs in its own memory format where no header can say which",
        "csrc/transport.c",
        "    *mark = false;\n  } else {",
        "    (void)0;\n  } else {",
        "test_ranks_of_different_memory_formats and 2",
    ),
    Mutant(
        "reported-once",
        "a report that fails is not tried again",
        "csrc/transport_c10d.c",
        "    (void)try_report(group, message, &second);\n",
        "    (void)second;\n",
        "test_a_report_that_fails",
    ),
    Mutant(
        "no-timeout",
        "nobody looks how long an exchange takes",
        COMM,
        "hc_clock() > late->deadline && ",
        "false && ",
        "test_timeout and exchange",
    ),
]


def try_mutant(mutant, verbose):
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"haloconv_{mutant.name}_") as name:
        folder = Path(name)
        mutation.copy_tree(folder)
        mutation.mutate(folder, mutant)
        try:
            environment = fakebuild.build(folder / "build", root=folder)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"mutant {mutant.name} doesn't compile:\n{error.stderr}") from error
        status, _, failed, text = fakebuild.run_pytest(
            environment,
            "-x",
            "--tb=short",
            "tests/test_transport_nccl.py",
            "-k",
            mutant.select,
            root=folder,
            HALOCONV_FAKE_SEED="0",
            HALOCONV_FAKE_LIMIT=mutant.limit,
            HALOCONV_GRACE_S="3",
            HALOCONV_TIMEOUT_FACTOR="0.3",
            HALOCONV_LONG="1",
        )
    caught = status == 1 and failed > 0
    print(
        f"{'✓' if caught else '✗'} {mutant.name}: {mutant.what}: {time.monotonic() - start:.0f} s", flush=True
    )
    if verbose or not caught:
        print(text[-3000:])
    return caught


def main():
    return mutation.run(MUTANTS, mutation.command_line(__doc__).parse_args(), try_mutant)


if __name__ == "__main__":
    sys.exit(main())
