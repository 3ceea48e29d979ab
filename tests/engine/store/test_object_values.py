"""Object stores through obstore: credentials, time limits and half-written objects, over moto and servers that lie."""

from __future__ import annotations

import http.server
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from servers import TalkingServer, TcpProxy, point_s3_at, running_s3, wait_until

from ragblend.engine.store.base import ByteStore
from ragblend.engine.store.remote.tier import open_remote
from ragblend.errors import BackendUnreachableError, UsageError

pytestmark = pytest.mark.timeout(120)

KEY, SECRET = "AKIDEXAMPLE", "geheim-wJalrXUtnFEMI"
LATE_S = 0.6  # a busy machine may be late by this much
DENIED = b"<?xml version='1.0'?>\n<Error><Code>InvalidAccessKeyId</Code><Message>No such key.</Message></Error>"


@pytest.fixture
def s3(monkeypatch):
    """moto behind a proxy, with the bucket `objects`, because moto servers of one process share their objects."""
    import boto3

    with running_s3() as port:
        proxy = TcpProxy(port)
        point_s3_at(proxy.port, monkeypatch)
        boto3.client("s3").create_bucket(Bucket="objects")
        yield proxy
        proxy.close()


CALLS: dict[str, Callable[[ByteStore], object]] = {
    "get": lambda values: values.get("a" * 32),
    "contains": lambda values: values.contains("a" * 32),
    "contains_many": lambda values: values.contains_many([f"{number:032x}" for number in range(200)]),
    "delete": lambda values: values.delete("a" * 32),
    "list_metadata": lambda values: values.list_metadata(),
    "get_metadata": lambda values: values.get_metadata("x"),
    "delete_metadata": lambda values: values.delete_metadata("x"),
    "ping": lambda values: values.ping(),
}


@pytest.mark.parametrize("mode", ["hang", "drip"])
def test_every_read_ends_at_its_time_limit_however_the_bytes_come(s3, mode, monkeypatch):
    """8 calls against a silent server and one that sends a byte every 20 ms."""
    open_remote("s3://objects/kv").values.put("a" * 32, bytes(10_000))
    monkeypatch.setattr("ragblend.engine.store.remote.object_values.WRITE_TIMEOUT_S", 0.5)
    values = open_remote("s3://objects/kv", timeout_s=0.5).values
    s3.mode = mode
    for name, call in CALLS.items():
        start_s = time.perf_counter()
        with pytest.raises(BackendUnreachableError, match="longer than"):
            call(values)
        assert time.perf_counter() - start_s < 0.5 + LATE_S, name
    s3.mode = "pass"
    wait_until(lambda: _reads(values), 30, "a client reads again what was stored")


def _reads(values: ByteStore) -> bool:
    try:
        return values.get("a" * 32) == bytes(10_000)
    except BackendUnreachableError:  # a busy machine may be slower than the time limit
        return False


def test_rejected_credentials_are_reported_without_the_secret(monkeypatch):
    answer = b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
    server = TalkingServer(lambda words: [answer % (len(DENIED), DENIED)], is_http=True)
    point_s3_at(server.port, monkeypatch)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    store = open_remote("s3://objects/kv", timeout_s=5.0)
    for name in ("get", "list_metadata", "get_metadata", "ping"):
        with pytest.raises(BackendUnreachableError, match="InvalidAccessKeyId: No such key") as caught:
            CALLS[name](store.values)
        assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert "InvalidAccessKeyId" in store.status().problem
    assert store.get("a" * 32) is None
    server.close()


@pytest.mark.parametrize(
    "url", [f"s3://{KEY}:{SECRET}@tests/kv", f"s3://tests/kv?secret_access_key={SECRET}", f"gs://u:{SECRET}@tests"]
)
def test_credentials_in_the_url_of_a_bucket_are_rejected_without_being_shown(url):
    with pytest.raises(UsageError, match="AWS_SECRET_ACCESS_KEY") as caught:
        open_remote(url)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_requests_are_signed_with_the_profile_that_the_user_chose(tmp_path, monkeypatch):
    signatures: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            signatures.append(self.headers["Authorization"])
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    point_s3_at(server.server_port, monkeypatch)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    for name in ("default", "work"):
        with (tmp_path / ".aws" / "credentials").open("a") as file:
            file.write(f"[{name}]\naws_access_key_id = AKID{name}\naws_secret_access_key = {SECRET}\n")
    assert open_remote("s3://objects/kv").values.get("a" * 32) is None
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert open_remote("s3://objects/kv").values.get("a" * 32) is None
    assert ["AKIDdefault/" in signatures[0], "AKIDwork/" in signatures[1]] == [True, True]
    server.shutdown()


@pytest.mark.parametrize("url", ["gs://bucket/kv", "az://container/kv"])
def test_google_and_azure_are_opened_by_what_s3_brings(url, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert open_remote(url).values.url == url


def test_a_killed_writer_leaves_no_parts_because_objects_are_one_request(s3):
    import boto3

    values = open_remote("s3://objects/kv", timeout_s=60).values
    values.put("a" * 32, bytes(20 << 20))
    (found,) = boto3.client("s3").list_objects_v2(Bucket="objects")["Contents"]
    assert (found["Key"], found["Size"]) == (f"kv/aa/{'a' * 32}.safetensors", 20 << 20)
    assert "-" not in found["ETag"], "it was uploaded in parts"


def write_again_and_again(url: str, started: Path) -> None:
    values = open_remote(url, timeout_s=60).values
    for number in range(10_000):
        values.put("a" * 32, bytes([number % 256]) * (4 << 20))
        started.touch()


def test_a_writer_killed_during_a_put_leaves_only_whole_objects(tmp_path):
    """10 kill -9 of a process that writes 4 MiB into a folder again and again."""
    url = f"file://{tmp_path}/shared"
    values = open_remote(url, timeout_s=60).values
    context = multiprocessing.get_context("forkserver")
    for number in range(10):
        started = tmp_path / f"started-{number}"
        writer = context.Process(target=write_again_and_again, args=(url, started))
        writer.start()
        wait_until(started.exists, 60, "the writer has written")
        time.sleep(0.003 * number)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        data = values.get("a" * 32)
        assert data == data[:1] * (4 << 20)
        assert list(values.sizes()) == [("a" * 32, 4 << 20)]
    values.delete_temporary_files()
    assert [path.name for path in (tmp_path / "shared").rglob("*") if path.is_file()] == [f"{'a' * 32}.safetensors"]


def test_a_forked_process_is_told_so_instead_of_hanging(s3):
    store = open_remote("s3://objects/kv", timeout_s=5.0)
    store.values.ping()
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def ask(opened: Callable[[], ByteStore]) -> None:
        try:
            opened().contains("a" * 32)
        except BackendUnreachableError as error:
            sender.send(str(error))

    for opened in (lambda: store.values, lambda: open_remote("s3://objects/kv").values):
        child = multiprocessing.get_context("fork").Process(target=partial(ask, opened))
        child.start()
        assert receiver.poll(30), "it hangs"
        assert "forked" in receiver.recv()
        child.join()


def test_a_folder_may_have_any_name(tmp_path):
    folder = tmp_path / "50% of it #1 ü"
    values = open_remote(f"file://{folder}", timeout_s=60).values
    values.ping()
    assert (list(values.sizes()), values.list_metadata(), values.get("ab"), folder.exists()) == ([], [], None, False)
    values.put("ab", b"bytes")
    values.put_metadata("note", b"{}")
    assert (values.get("ab"), values.contains("ab"), list(values.sizes())) == (b"bytes", True, [("ab", 5)])
    assert (folder / "ab" / "ab.safetensors").read_bytes() == b"bytes"
    assert (values.list_metadata(), values.get_metadata("note")) == (["note"], b"{}")
    assert (values.delete("ab"), values.delete("ab")) == (True, False)
