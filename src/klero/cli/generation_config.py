"""What a model's generation config asks for, in klero's words; used only when somebody asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from klero.cli.fields import FILTERS, SHAPING
from klero.errors import OptionError, ParameterError
from klero.params import SamplingParams
from klero.params.aliases import ALIASES

DRAWING = frozenset({*SHAPING, *FILTERS})
# They change no token, or klero has them from elsewhere (end ids), or they are read on their own (do_sample).
SILENT = frozenset({"transformers_version", "use_cache", "cache_implementation", "cache_config", "do_sample"})
SILENT_PREFIXES = ("_", "output_", "return_")
SILENT_SUFFIX = "_token_id"
FORCED = "forced_"  # what has this name changes tokens, whatever its end


@dataclass(frozen=True)
class ModelDefaults:
    """fields: of SamplingParams. unknown: not in SamplingParams. idle: without do_sample they do nothing."""

    fields: dict[str, Any]
    unknown: dict[str, Any]
    idle: dict[str, Any]

    def lines(self) -> list[str]:
        """What to tell the user."""
        said = [f"from the model's generation config: {_written(self.fields) or 'nothing that klero knows'}"]
        if self.unknown:
            said.append(f"in it, but not known to klero and left out: {_written(self.unknown)}")
        if self.idle:
            said.append(f"in it, but idle, since do_sample is not set: {_written(self.idle)}")
        return said


def of_model(model: Any) -> ModelDefaults:
    """Read the generation config of a loaded model. OptionError if it has none, or values that break a rule."""
    config = getattr(getattr(model, "module", None), "generation_config", None)
    if config is None:
        raise OptionError("--generation-config: this model comes without a generation config; leave the option out")
    defaults = read(config.to_diff_dict())
    try:
        SamplingParams.from_dict(defaults.fields)
    except ParameterError as error:
        raise OptionError(f"--generation-config: the model's own values break a rule ({error})") from None
    return defaults


def read(config: Mapping[str, Any]) -> ModelDefaults:
    """Sort the values of a generation config, as transformers means them: without do_sample it is greedy.

    With do_sample an unset temperature is 1. transformers would also take top_k = 50 where the model's file says
    nothing; that is its default and not the model's, and is not taken over.
    """
    known = SamplingParams.__dataclass_fields__
    fields: dict[str, Any] = {"temperature": 1.0} if config.get("do_sample") else {}
    unknown: dict[str, Any] = {}
    idle: dict[str, Any] = {}
    for name, value in config.items():
        if value is None or _is_silent(name):
            continue
        field = ALIASES.get(name, name)
        if field not in known:
            unknown[name] = value
        elif field in DRAWING and not config.get("do_sample"):
            idle[name] = value
        elif field == "bad_token_ids" and field in fields:  # transformers has two names for bans, and both hold
            fields[field] = [*fields[field], *value]
        else:
            fields[field] = value
    return ModelDefaults(fields, unknown, idle)


def _is_silent(name: str) -> bool:
    ends = name.endswith(SILENT_SUFFIX) and not name.startswith(FORCED)
    return name in SILENT or name.startswith(SILENT_PREFIXES) or ends


def _written(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
