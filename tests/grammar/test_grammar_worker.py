"""KillableWorker: a deadline that holds, and a fresh process after it."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from grammar import GrammarCompiler, GrammarLimits, GrammarSpec, UnsupportedGrammar
from grammar.backends.killable_worker import KillableWorker, WorkerDied
from tests.grammar.vocabularies import make_byte_vocabulary

SCRIPT = """
import json, os, sys, time

def read():
    head = sys.stdin.buffer.read(4)
    if len(head) < 4:
        sys.exit()
    return json.loads(sys.stdin.buffer.read(int.from_bytes(head, "big")))

def write(value):
    data = json.dumps(value).encode()
    sys.stdout.buffer.write(len(data).to_bytes(4, "big") + data)
    sys.stdout.buffer.flush()

write(read())
while True:
    order = read()
    if order == "die":
        sys.exit(1)
    time.sleep(order.get("seconds", 0))
    write({"pid": os.getpid(), "text": order.get("text")})
"""


@pytest.fixture
def worker(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    worker = KillableWorker(script, {"hello": True}, start_seconds=30)
    yield worker
    worker.close()


def test_orders_are_answered_by_one_process(worker):
    text = "é" * 200_000
    first, second = worker.ask({"text": text}, 30), worker.ask({}, 30)
    assert first["text"] == text
    assert first["pid"] == second["pid"]


def test_a_late_answer_kills_the_process_and_the_next_order_gets_a_new_one(worker):
    pid, start = worker.ask({}, 30)["pid"], time.monotonic()
    with pytest.raises(WorkerDied, match=r"0\.2 s"):
        worker.ask({"seconds": 60}, 0.2)
    assert time.monotonic() - start < 20
    assert worker.ask({}, 30)["pid"] != pid


def test_a_process_that_never_reads_is_killed_at_the_deadline(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(60)")
    worker = KillableWorker(script, {"text": "x" * 1_000_000}, start_seconds=0.2)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(worker.ask, {}, 0.2)
        try:
            with pytest.raises(WorkerDied):
                job.result(timeout=20)
        finally:
            worker.close()


def test_a_process_that_ends_is_reported_and_replaced(worker):
    with pytest.raises(WorkerDied):
        worker.ask("die", 30)
    assert worker.ask({}, 30)["pid"]


def test_a_grammar_that_compiles_too_long_is_refused_and_the_next_one_works():
    compiler = GrammarCompiler(make_byte_vocabulary(), GrammarLimits(max_xgrammar_s=0.0), num_threads=1)
    with pytest.raises(UnsupportedGrammar, match="too large for xgrammar"):
        compiler.compile(GrammarSpec.ebnf('root ::= "a"'))
    compiler.close()


def test_a_closed_worker_can_be_used_again(worker):
    pid = worker.ask({}, 30)["pid"]
    worker.close()
    assert worker.ask({}, 30)["pid"] != pid


def test_closing_ends_an_order_under_way(worker):
    worker.ask({}, 30)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(worker.ask, {"seconds": 60}, 60)
        while not worker._lock.locked():
            time.sleep(0.01)
        start = time.monotonic()
        worker.close()
        assert time.monotonic() - start < 20
        with pytest.raises(WorkerDied):
            job.result(timeout=20)
