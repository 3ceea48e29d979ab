"""The page's server: an ASGI app of a few routes, and the process that runs it.

Whatever takes time is a job at the desk; its events go out as they come (server-sent events). Read `make_app` first.
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
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import ASGIApp
except ImportError as error:
    raise ImportError("ragblend ui needs Starlette and uvicorn: pip install 'ragblend[ui]'") from error

from ragblend.config import Settings, with_flags
from ragblend.engine.api import Engine
from ragblend.errors import RagblendError, StoreFullError, UsageError
from ragblend.index import ChunkIndex
from ragblend.lab.explain_page import tokens_style
from ragblend.lab.ui.answers import RetrieveChunks, UiState, answer_question, blend_again
from ragblend.lab.ui.guard import OriginGuard, is_loopback
from ragblend.lab.ui.job_queue import JobQueue, UiJob
from ragblend.lab.ui.timeouts import HeadTimeoutProtocol, SlowBodyError, limit_body_time
from ragblend.lab.ui.uploads import TooLargeError, Upload, ingest_uploads, uploads_folder, validate_file_name
from ragblend.options import SHARE

log = logging.getLogger(__name__)

_PAGE = Path(__file__).parent / "page"
_BODY_BYTES = 1 << 18  # of a question with what surrounds it
_REST_BYTES, _REST_S = 1 << 28, 10  # of a body that is too large, read before it is said
_KILLED = 130
_STOP_S = 5  # for answers that are still going out when the server ends

OpenEngine = Callable[[UiJob], tuple[Engine, ChunkIndex]]


def make_app(
    settings: Settings, open_: OpenEngine, find: RetrieveChunks, desk: JobQueue, host: str = "127.0.0.1"
) -> ASGIApp:
    """The app. `open_` opens the engine and the index, as the desk's first job; `find` finds a question's chunks."""
    room = UiState(settings, find)

    def load(job: UiJob) -> None:
        try:
            room.engine, room.index = open_(job)
        except Exception as error:
            room.problem = with_flags(str(error)) if isinstance(error, RagblendError | ImportError) else repr(error)
            log.error("%s", room.problem)
            raise

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        desk.submit(load, "loading the model", is_kept=True)
        yield
        desk.close()
        await run_in_threadpool(_close_after_jobs, desk, room)

    async def state(request: Request) -> Response:
        now = desk.current
        facts = await run_in_threadpool(room.collect_page_state)
        return JSONResponse({**facts, "now": now._asdict() if now is not None else None})

    async def upload(request: Request) -> Response:
        with Upload(uploads_folder(settings.store), request.query_params.get("name", ""), settings.max_file_mib) as to:
            async with _read_body_parts(request) as parts:
                to.check_size(int(request.headers.get("content-length") or 0))
                async for data in parts:
                    to.add(data)
            await run_in_threadpool(to.commit)
        return JSONResponse({"name": request.query_params["name"]}, 201)

    async def take(request: Request) -> Response:
        names = (await _read_json_body(request)).get("names")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise UsageError("names is no list of uploads' names")
        for name in names:
            validate_file_name(name)
        job = desk.submit(
            lambda job: ingest_uploads(job, names, *room.engine_and_index, settings),
            "ingesting documents",
            is_kept=True,
        )
        return _stream_events(job)

    async def question(request: Request) -> Response:
        text = (await _read_json_body(request)).get("question")
        if not isinstance(text, str) or not text.strip():
            raise UsageError("the question is empty; write what you want to know")
        return _stream_events(desk.submit(lambda job: answer_question(job, text, room), "answering a question"))

    async def again(request: Request) -> Response:
        body = await _read_json_body(request)
        name, ratio = body.get("id"), body.get("ratio")
        if not isinstance(name, str):
            raise UsageError(f"id is {name!r:.40}; send the id of a question that was answered")
        if not isinstance(ratio, int | float):
            raise UsageError(f"ratio is {ratio!r:.40}; send a number from 0 to 1")
        SHARE.validate("ratio", ratio)  # before it becomes a float, which holds no number of 400 digits
        return _stream_events(desk.submit(lambda job: blend_again(job, name, float(ratio), room), "blending again"))

    app = Starlette(
        routes=[
            *(Route(path, _file(name, kind)) for path, (name, kind) in _FILES.items()),
            Route("/state", state),
            Route("/documents", upload, methods=["POST"]),
            Route("/ingest", take, methods=["POST"]),
            Route("/ask", question, methods=["POST"]),
            Route("/blend", again, methods=["POST"]),
        ],
        exception_handlers={RagblendError: _error_response, ClientDisconnect: _disconnected_response},
        lifespan=lifespan,
    )
    return OriginGuard(app, host)


def serve(
    settings: Settings,
    open_: OpenEngine,
    find: RetrieveChunks,
    *,
    host: str,
    port: int,
    browser: bool,
    notify: Callable[[str], None],
) -> None:
    """Serve the page until Ctrl-C. Raises UsageError where the address cannot be listened on."""
    listening = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listening.getsockname()[1]}/"
    notify(f"the page is at {url} (Ctrl-C ends it)")
    if not is_loopback(host):
        notify(f"whoever reaches {host} can read these documents, add some and ask: there is no password")
    desk = JobQueue()
    app = make_app(settings, open_, find, desk, host)
    if browser:  # what is asked before the server runs waits in the socket
        webbrowser.open(url.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]"))
    server = _Server(server_config(app), desk, notify)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again, after a tidy end
        server.run(sockets=[listening])


def server_config(app: ASGIApp) -> uvicorn.Config:
    """The configuration of the page's server: its log, its time limits."""
    return uvicorn.Config(app, http=HeadTimeoutProtocol, log_level="warning", timeout_graceful_shutdown=_STOP_S)


class _Server(uvicorn.Server):
    """Ends the jobs as soon as it is told to end: their answers are what it would wait for."""

    def __init__(self, config: uvicorn.Config, desk: JobQueue, notify: Callable[[str], None]) -> None:
        super().__init__(config)
        self._desk, self._notify = desk, notify

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first time a tidy end, after the prefill that runs; the second time at once."""
        if self.should_exit:
            os._exit(_KILLED)  # what is stored survives that
        if self._desk.current is not None:
            self._notify("ending; Ctrl-C once more ends it at once")
        self._desk.close()
        super().handle_exit(sig, frame)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(
            f"nothing can listen on {host}, port {port} ({error.strerror or error}); choose another: --port {port + 1}"
        ) from error


def _close_after_jobs(desk: JobQueue, room: UiState) -> None:
    """After the worker's last job, on a thread that may wait."""
    desk.join()
    room.questions.clear()
    if room.index is not None:
        room.index.close()
    if room.engine is not None:
        room.engine.close()


# -- requests and answers


@asynccontextmanager
async def _read_body_parts(request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
    """The request's body, part by part. What is too large is read on for a while and let go: a socket that is closed
    with bytes in it is reset, and the client, which still sends, would never see the answer that says why."""
    parts = limit_body_time(request.stream())
    try:
        yield parts
    except TooLargeError:
        num_bytes = 0
        with suppress(TimeoutError, ClientDisconnect, SlowBodyError):
            async with asyncio.timeout(_REST_S):
                async for part in parts:
                    num_bytes += len(part)
                    if num_bytes > _REST_BYTES:
                        break
        raise


async def _read_json_body(request: Request) -> dict[str, Any]:
    """The JSON object in a request; UsageError for anything else."""
    data = b""
    async with _read_body_parts(request) as parts:
        async for part in parts:
            data += part
            if len(data) > _BODY_BYTES:
                raise TooLargeError(f"this is longer than {_BODY_BYTES >> 10} KiB; ask a shorter question")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:  # RecursionError: arrays or objects nested thousands deep
        raise UsageError(f"the request's body is not JSON that can be read: {error}; send a flat object") from error
    if not isinstance(found, dict):
        raise UsageError("this is no JSON object")
    return found


def _stream_events(job: UiJob) -> Response:
    """A job's events as they come."""

    async def lines() -> AsyncIterator[str]:
        async for name, facts in job.events():
            # JSON has no line break in it, so one event is one line whatever a text holds.
            yield f"event: {name}\ndata: {json.dumps(facts)}\n\n" if name else ": still at it\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


async def _error_response(request: Request, error: Exception) -> Response:
    statuses = {TooLargeError: 413, SlowBodyError: 408, StoreFullError: 507}
    status = next((status for kind, status in statuses.items() if isinstance(error, kind)), 400)
    return JSONResponse({"error": with_flags(str(error))}, status, {"connection": "close"})


async def _disconnected_response(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # to nobody


_FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


def _file(name: str, kind: str) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        return Response(_text(name), media_type=kind)

    return answer


@cache
def _text(name: str) -> str:
    text = (_PAGE / name).read_text(encoding="utf-8")
    return tokens_style() + text if name == "page.css" else text
