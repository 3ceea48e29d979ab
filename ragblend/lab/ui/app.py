"""The page's server: an ASGI app of a few routes, and the process that runs it.

Slow work is a job of the JobQueue. A job's events are sent at once (server-sent events). Read `make_app` first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import webbrowser
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import SpooledTemporaryFile
from types import FrameType
from typing import Any

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles
    from starlette.types import ASGIApp
except ImportError as error:
    raise ImportError("ragblend ui needs Starlette and uvicorn: pip install 'ragblend[ui]'") from error

from ragblend.config import Settings, arguments_to_flags
from ragblend.engine.api import Engine
from ragblend.errors import RagblendError, StoreFullError, UsageError
from ragblend.index import ChunkIndex
from ragblend.lab.explain_page import tokens_style
from ragblend.lab.ui.answers import RetrieveChunks, UiState, answer_question, blend_again
from ragblend.lab.ui.guard import OriginGuard, is_loopback
from ragblend.lab.ui.job_queue import JobQueue, UiJob
from ragblend.lab.ui.uploads import (
    SPOOL_BYTES,
    TooLargeError,
    check_upload_size,
    ingest_uploads,
    save_upload,
    uploads_folder,
    validate_file_name,
)
from ragblend.options import SHARE

log = logging.getLogger(__name__)

_PAGE = Path(__file__).parent / "page"
_BODY_BYTES = 1 << 18  # largest JSON body
_REST_BYTES, _REST_S = 1 << 28, 10  # read and dropped of a body that is too large
_KILLED = 130
_STOP_S = 5  # for responses that are still being sent when the server ends

OpenEngine = Callable[[UiJob], tuple[Engine, ChunkIndex]]


def make_app(
    settings: Settings, open_engine: OpenEngine, retrieve: RetrieveChunks, jobs: JobQueue, host: str = "127.0.0.1"
) -> ASGIApp:
    """Return the ASGI app behind the page of `ragblend ui`.

    `open_engine` opens the engine and the index. It runs as the first of `jobs`. `retrieve` returns the chunks for a
    question. `host`: the address that the server listens on.
    """
    ui = UiState(settings, retrieve)

    def load(job: UiJob) -> None:
        try:
            ui.engine, ui.index = open_engine(job)
        except Exception as error:
            ui.problem = (
                arguments_to_flags(str(error)) if isinstance(error, RagblendError | ImportError) else repr(error)
            )
            log.error("%s", ui.problem)
            raise

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        jobs.submit(load, "loading the model", is_kept=True)
        yield
        jobs.close()
        await run_in_threadpool(_close_after_jobs, jobs, ui)

    async def state(request: Request) -> Response:
        now = jobs.current
        return JSONResponse({**await run_in_threadpool(ui.collect_page_state), "now": now})

    async def style(request: Request) -> Response:
        return Response(tokens_style(), media_type="text/css")

    async def upload(request: Request) -> Response:
        num_bytes, limit_mib = 0, settings.max_file_mib
        async with _read_body_parts(request) as parts:
            name = validate_file_name(request.query_params.get("name", ""))
            check_upload_size(name, int(request.headers.get("content-length") or 0), limit_mib)
            with SpooledTemporaryFile(SPOOL_BYTES) as file:
                async for data in parts:
                    num_bytes += len(data)
                    check_upload_size(name, num_bytes, limit_mib)
                    file.write(data)
                await run_in_threadpool(save_upload, uploads_folder(settings.store) / name, file, num_bytes)
        return JSONResponse({"name": name}, 201)

    async def take(request: Request) -> Response:
        names = (await _read_json_body(request)).get("names")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise UsageError("names is not a list of uploads' names; send the names of files that were uploaded")
        for name in names:
            validate_file_name(name)
        job = jobs.submit(
            lambda job: ingest_uploads(job, names, *ui.engine_and_index, settings),
            "ingesting documents",
            is_kept=True,
        )
        return _stream_events(job)

    async def question(request: Request) -> Response:
        text = (await _read_json_body(request)).get("question")
        if not isinstance(text, str) or not text.strip():
            raise UsageError("the question is empty; write what you want to know")
        return _stream_events(jobs.submit(lambda job: answer_question(job, text, ui), "answering a question"))

    async def again(request: Request) -> Response:
        body = await _read_json_body(request)
        name, ratio = body.get("id"), body.get("ratio")
        if not isinstance(name, str):
            raise UsageError(f"id is {name!r:.40}; send the id of a question that was answered")
        if not isinstance(ratio, int | float):
            raise UsageError(f"ratio is {ratio!r:.40}; send a number from 0 to 1")
        SHARE.validate("ratio", ratio)  # before the conversion to float, which fails for a number of 400 digits
        return _stream_events(jobs.submit(lambda job: blend_again(job, name, float(ratio), ui), "blending again"))

    app = Starlette(
        routes=[
            Route("/state", state),
            Route("/documents", upload, methods=["POST"]),
            Route("/ingest", take, methods=["POST"]),
            Route("/ask", question, methods=["POST"]),
            Route("/blend", again, methods=["POST"]),
            Route("/tokens.css", style),
            Mount("/", StaticFiles(directory=_PAGE, html=True)),
        ],
        exception_handlers={RagblendError: _error_response, ClientDisconnect: _error_response},
        lifespan=lifespan,
    )
    return OriginGuard(app, host)


def serve(
    settings: Settings,
    open_engine: OpenEngine,
    retrieve: RetrieveChunks,
    *,
    host: str,
    port: int,
    browser: bool,
    notify: Callable[[str], None],
) -> None:
    """Serve the page of `ragblend ui` until Ctrl-C. Raises UsageError if the server cannot listen on the address.

    `open_engine`, `retrieve`: see `make_app`. `browser`: True opens the page in a browser. `notify` is called with
    messages for the user.
    """
    listening = _listen(host, port)
    address = f"[{host}]" if ":" in host else host
    url = f"http://{address}:{listening.getsockname()[1]}/"
    notify(f"the page is at {url} (Ctrl-C ends it)")
    if not is_loopback(host):
        notify(f"the page has no password: everyone who can reach {host} can read, add and query documents")
    jobs = JobQueue()
    app = make_app(settings, open_engine, retrieve, jobs, host)
    if browser:  # before the server runs: its requests wait in the socket
        webbrowser.open(url.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]"))
    server = _Server(server_config(app), jobs, notify)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after it has stopped
        server.run(sockets=[listening])


def server_config(app: ASGIApp) -> uvicorn.Config:
    """Return uvicorn's configuration for the page."""
    return uvicorn.Config(app, http="h11", log_level="warning", timeout_graceful_shutdown=_STOP_S)


class _Server(uvicorn.Server):
    """A server that cancels the jobs when it is stopped, because uvicorn would wait for their responses."""

    def __init__(self, config: uvicorn.Config, jobs: JobQueue, notify: Callable[[str], None]) -> None:
        super().__init__(config)
        self._jobs, self._notify = jobs, notify

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server after the prefill that runs; on the second signal, end the process at once."""
        if self.should_exit:
            os._exit(_KILLED)  # stored entries survive this
        if self._jobs.current is not None:
            self._notify("stopping; press Ctrl-C again to stop at once")
        self._jobs.close()
        super().handle_exit(sig, frame)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}, port {port} ({error.strerror or error}); choose another: --port {port + 1}"
        ) from error


def _close_after_jobs(jobs: JobQueue, ui: UiState) -> None:
    """Close the engine and the index after the last job. May block."""
    jobs.wait_for_jobs()
    ui.questions.clear()
    if ui.index is not None:
        ui.index.close()
    if ui.engine is not None:
        ui.engine.close()


# -- requests and answers


@asynccontextmanager
async def _read_body_parts(request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
    """Give the parts of the request's body. If it is rejected, up to `_REST_BYTES` more are read and dropped: closing a
    socket with unread bytes resets it, and the client would not receive the error."""
    parts = request.stream()
    try:
        yield parts
    except RagblendError:
        num_bytes = 0
        with suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(_REST_S):
                async for part in parts:
                    num_bytes += len(part)
                    if num_bytes > _REST_BYTES:
                        break
        raise


async def _read_json_body(request: Request) -> dict[str, Any]:
    """Return the JSON object in a request. Raises UsageError if the body is not a JSON object."""
    data = b""
    async with _read_body_parts(request) as parts:
        async for part in parts:
            data += part
            if len(data) > _BODY_BYTES:
                raise TooLargeError(f"the request is longer than {_BODY_BYTES >> 10} KiB; ask a shorter question")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:  # RecursionError: arrays or objects nested thousands deep
        raise UsageError(f"cannot read the request's body as JSON: {error}; send a flat object") from error
    if not isinstance(body, dict):
        raise UsageError("the request's body is not a JSON object; send one")
    return body


def _stream_events(job: UiJob) -> Response:
    """Return a response that sends the job's events as they come."""

    async def lines() -> AsyncIterator[str]:
        async for name, facts in job.events():
            # json.dumps escapes line breaks, so one event is one line of data.
            yield f"event: {name}\ndata: {json.dumps(facts)}\n\n" if name else ": still at it\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


async def _error_response(request: Request, error: Exception) -> Response:
    """Return the error's message; a client that has disconnected does not receive it."""
    statuses = {TooLargeError: 413, StoreFullError: 507}
    status = next((status for kind, status in statuses.items() if isinstance(error, kind)), 400)
    return JSONResponse({"error": arguments_to_flags(str(error))}, status, {"connection": "close"})
