"""Parameters of a request to the vLLM connector and its report in the response: `kv_transfer_params["ragblend"]`.

Shared by the connector and by every client of a vLLM server, so it imports neither vLLM nor torch.

    request   {"version": 1, "mode": "blend", "rule": "auto", "ratio": 0.15, "refine_ratio": 0.3, "namespace": "",
               "seed": 0, "check_layers": [1, 8], "recompute_ratios": [0.2, 0.1], ...}
    response  {"version": 1, "mode": "blend", "rule": "ask", "recompute_ratio": 0.05, ...}: BlendReport's fields

SelectionOptions' fields may be added. All fields of a request have defaults, and a request without parameters gets the
server's. The connector finds the chunks in the request's token ids. Keys are never sent; the connector computes them
from the ids. Modes:

- "blend", "reuse": stored chunks are placed, and the share `ratio` of their tokens (0 in "reuse") is recomputed. The
  ratio "auto" is calibrated in the server's store. The ratio null is the server's default, "auto" unless configured.
  With `refine_ratio`, "blend" recomputes that share after the first token; null is the server's, 0 unless configured.
- "full": nothing is reused, not even vLLM's prefix cache. "prefix": only vLLM's own prefix cache is reused.
- "ingest": `span` is the chunk to store, as positions [start, end) in the token ids. It is computed after the ids
  before it. At least one id must follow it, because vLLM needs a token to sample from. Request one token and ignore it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from ragblend.engine.namespaces import check_namespace
from ragblend.engine.report import BlendReport
from ragblend.errors import UsageError
from ragblend.option_fields import copy_option, default_of, one_of, option
from ragblend.options import MODES, GenerationOptions, LoadOptions, Mode, RatioChoice, SelectionOptions

PARAMS_KEY = "ragblend"
"""The key in vLLM's `kv_transfer_params`, in both directions."""
TENANT_KEY = "ragblend_tenant"
"""Second key, which a server's front end adds for its engine: the namespace of the request's API key."""
PARAMS_VERSION = 1
_MAX_NAMES = 10  # unknown parameters that an error names
MAX_RUNS = 1024
"""Most runs of chunks in one request. A lookup of more would delay other requests."""

VllmMode = Literal["blend", "reuse", "full", "prefix", "ingest"]
VLLM_MODES: tuple[VllmMode, ...] = get_args(VllmMode)


@dataclass(frozen=True, slots=True)
class BlendParams(SelectionOptions):
    """Parameters of one request, with those of SelectionOptions. Invalid values raise UsageError."""

    mode: VllmMode = option(default_of(GenerationOptions, "mode"), "Mode, or ingest.", one_of(*VLLM_MODES))
    rule: str = copy_option(GenerationOptions, "rule")
    ratio: RatioChoice = copy_option(GenerationOptions, "recompute_ratio")  # None: the server's
    refine_ratio: float | None = copy_option(GenerationOptions, "refine_ratio")  # None: the server's
    namespace: str = copy_option(LoadOptions, "namespace")
    seed: int | None = copy_option(GenerationOptions, "seed")  # for the rule "random"; None is 0
    span: tuple[int, int] | None = None  # for mode "ingest": token positions [start, end) of the chunk
    version: int = PARAMS_VERSION

    def __post_init__(self) -> None:
        if self.version != PARAMS_VERSION:
            raise UsageError(
                f"the version of the ragblend parameters is {_short(self.version)}, but this server reads "
                f"{PARAMS_VERSION}; install the same release of ragblend on client and server"
            )
        SelectionOptions.__post_init__(self)
        if self.mode == "ingest":
            if not _is_span(self.span):
                raise UsageError(f"span is {_short(self.span)}; mode 'ingest' needs [start, end) with 0 <= start < end")
        elif self.span is not None:
            raise UsageError(
                f"mode {self.mode!r} has no span; the server finds the chunks in the token ids; leave it out"
            )

    def check_tokens_after_span(self, num_tokens: int) -> None:
        """Raise UsageError unless a prompt of `num_tokens` has a token after the span."""
        if self.span is not None and self.span[1] >= num_tokens:
            raise UsageError(
                f"the span ends at {self.span[1]}, but the prompt has {num_tokens} tokens, and mode 'ingest' needs at "
                "least one token after the span; append any token"
            )

    @classmethod
    def from_options(cls, options: GenerationOptions, namespace: str) -> BlendParams:
        """Return the parameters of a prompt with these generation options."""
        return cls(
            mode=options.mode,
            rule=options.rule,
            ratio=options.recompute_ratio,
            namespace=namespace,
            refine_ratio=options.refine_ratio,
            seed=options.seed,
            **options.selection,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the request's `kv_transfer_params` as JSON values."""
        return {PARAMS_KEY: {**asdict(self), "span": None if self.span is None else list(self.span)}}

    @property
    def reported_mode(self) -> Mode:
        """Mode in the request's report: "full" for an ingestion, because it prefills in full."""
        return "full" if self.mode == "ingest" else self.mode


def parse_params(raw: object) -> BlendParams:
    """Return the parameters in `raw`, the value of `kv_transfer_params["ragblend"]`. Raises UsageError if invalid.

    >>> parse_params({"mode": "ingest", "span": [1, 4]}).span
    (1, 4)
    """
    if not isinstance(raw, Mapping):
        raise UsageError(f"ragblend parameters are {type(raw).__name__}; send an object such as {{'mode': 'blend'}}")
    unknown = sorted(str(name) for name in raw if name not in {field.name for field in fields(BlendParams)})
    if unknown:
        raise UsageError(f"unknown ragblend parameters: {', '.join(map(_short, unknown[:_MAX_NAMES]))}")
    if isinstance(raw.get("namespace"), str):
        # Prompts name a salt itself. The server, which stores documents, knows no more than the salt's hash.
        check_namespace(raw["namespace"], allows_salt=raw.get("mode") == "ingest")
    span = raw.get("span")
    return BlendParams(**{**raw, "span": tuple(span) if isinstance(span, list) else span})


_OF_THE_CLIENT = frozenset({"ttft_s", "decode_s", "prompt_tokens", "completion_tokens"})


def report_to_json(report: BlendReport) -> dict[str, Any]:
    """Return a report as JSON values. It has no times of the client, and no token counts: OpenAI's `usage` has them."""
    facts = {name: value for name, value in report.as_dict().items() if name not in _OF_THE_CLIENT}
    return {"version": PARAMS_VERSION, **facts}


def report_from_params(kv_transfer_params: Mapping[str, Any] | None) -> BlendReport | None:
    """Return the report in a response's `kv_transfer_params`; None without a report, or if its version differs."""
    raw = (kv_transfer_params or {}).get(PARAMS_KEY)
    if not isinstance(raw, Mapping) or raw.get("version") != PARAMS_VERSION or raw.get("mode") not in MODES:
        return None
    try:
        return BlendReport.from_dict(raw)
    except (TypeError, AttributeError):
        return None


def vllm_filters_and_penalties(options: GenerationOptions) -> dict[str, Any]:
    """Return vLLM's sampling parameters for top-k, min-p, penalties and, if requested, logit bias.

    Parameters that `options` lacks get a value without effect. vLLM would otherwise use the model's generation_config,
    which the transformers engine does not use.
    """
    bias = {int(token): float(value) for token, value in (options.logit_bias or {}).items()}
    return {
        "top_k": options.top_k or 0,
        "min_p": options.min_p or 0.0,
        "repetition_penalty": 1.0 if options.repetition_penalty is None else options.repetition_penalty,
        "presence_penalty": options.presence_penalty or 0.0,
        "frequency_penalty": options.frequency_penalty or 0.0,
        **({"logit_bias": bias} if bias else {}),
    }


def vllm_structured_outputs(structured_outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return GenerationOptions' `structured_outputs` in vLLM's form: a structural tag becomes a JSON string.

    JSON schemas in the tag then allow at most one blank in a row, because a small model may write only blanks.
    """
    ((name, value),) = structured_outputs.items()
    if name != "structural_tag" or isinstance(value, str):
        return dict(structured_outputs)
    return {name: json.dumps(_with_few_blanks(value))}


def _with_few_blanks(format: Any) -> Any:
    if isinstance(format, list):
        return [_with_few_blanks(each) for each in format]
    if not isinstance(format, Mapping):
        return format
    if format.get("type") == "json_schema":
        return {"max_whitespace_cnt": 1, **format}
    return {name: _with_few_blanks(value) for name, value in format.items()}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _is_span(value: object) -> bool:
    is_pair = isinstance(value, tuple) and len(value) == 2 and all(type(each) is int for each in value)
    return is_pair and bool(0 <= value[0] < value[1])  # type: ignore[index]
