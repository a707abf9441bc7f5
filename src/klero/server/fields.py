"""The fields of SamplingParams as a body brings them: a JSON schema for each, for readers and tools; and refused ones.

`SamplingParams` alone decides what is right; the schemas say the same to those who read OpenAPI (docs/rules.md).
"""

from __future__ import annotations

from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from klero.params.guided import MAX_CHOICES, MAX_TAGS

Schema = dict[str, Any]

NOT_OVER_HTTP = {
    "filters": "is a callable, which JSON cannot bring; give it to klero.LLM in Python",
    "logits_processors": "is a callable, which JSON cannot bring; give it to klero.LLM in Python",
    "return_context_logits": "is rows of numbers, too many for JSON; ask klero.LLM in Python",
    "return_generation_logits": "is rows of numbers, too many for JSON; ask klero.LLM in Python",
}
"""Fields that no body may have, and why."""


def nullable(schema: Schema, text: str) -> Schema:
    """A schema that null satisfies as well, as silence; and what the field does."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return {**schema, "type": [kind, "null"], "description": text}
    return {"anyOf": [*schema.get("anyOf", [schema]), {"type": "null"}], "description": text}


def number(low: float, high: float, text: str, **more: Any) -> Schema:
    """A number in [low, high]; more: exclusive bounds and the like."""
    return nullable({"type": "number", "minimum": low, "maximum": high, **more}, text)


def integer(low: int, text: str, high: int | None = None) -> Schema:
    """An integer from low on, or in [low, high]."""
    most = {} if high is None else {"maximum": high}
    return nullable({"type": "integer", "minimum": low, **most}, text)


def flag(text: str) -> Schema:
    """True or false."""
    return nullable({"type": "boolean"}, text)


def string(text: str, **more: Any) -> Schema:
    """A text."""
    return nullable({"type": "string", **more}, text)


def given(name: str, schema: Schema | None = None) -> Schema:
    """A field is there, and is what the schema says; no null without one."""
    return {"required": [name], "properties": {name: schema or {"not": {"type": "null"}}}}


def unless(name: str, *off: Any, beside: list[Schema]) -> Schema:
    """A field is left out, null or one of `off`, or one of these stands beside it."""
    return {"anyOf": [{"properties": {name: {"enum": [None, *off]}}}, *beside]}


ID: Schema = {"type": "integer", "minimum": 0}
IDS: Schema = {"type": "array", "items": ID}
TEXT: Schema = {"type": "string", "minLength": 1}
TEXTS: Schema = {"anyOf": [TEXT, {"type": "array", "items": TEXT}]}
SEQUENCES: Schema = {"type": "array", "items": {"anyOf": [ID, {**IDS, "minItems": 1}]}}
BIAS: Schema = {"type": "object", "propertyNames": {"pattern": "^[0-9]{1,20}$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}  # fmt: skip
SCHEMA: Schema = {"anyOf": [{"type": "object"}, {"type": "boolean"}]}
TAG: Schema = {
    "type": "object", "required": ["structures", "triggers"], "additionalProperties": False,
    "properties": {
        "type": {"const": "structural_tag"},
        "triggers": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": MAX_TAGS},
        "structures": {"type": "array", "minItems": 1, "maxItems": MAX_TAGS, "items": {
            "type": "object", "required": ["begin", "schema", "end"], "additionalProperties": False,
            "properties": {"begin": {"type": "string"}, "schema": {"anyOf": [*SCHEMA["anyOf"], TEXT]},
                           "end": {"type": "string"}},
        }},
    },
}  # fmt: skip
SEEDS = 2**64 - 1
BINARY32 = 3.4028234663852886e38

FIELDS: dict[str, Schema] = {
    "temperature": number(0, 1e6, "Divides the logits; 0 is greedy. Default 1."),
    "top_k": integer(-1, "Keep exactly the k most likely tokens; 0 or -1: off, 1: greedy."),
    "top_p": number(0, 1, "Keep the shortest prefix with this mass. Default 1."),
    "min_p": number(0, 1, "Keep tokens at least this likely beside the most likely one."),
    "top_p_decay": number(0, 1, "Multiply top_p by this after each token.", exclusiveMinimum=0),
    "top_p_min": number(0, 1, "Where the decay ends; needs top_p_decay.", exclusiveMinimum=0),
    "top_p_reset_id": integer(0, "After this token top_p begins anew; needs top_p_decay."),
    "top_n_sigma": number(-1, 1e6, "Keep logits within so many deviations of the largest; 0 or -1: off."),
    "epsilon_cutoff": number(0, 1, "Keep tokens at least this likely; 0: off.", exclusiveMaximum=1),
    "eta_cutoff": number(0, 1, "The same, less strict at high entropy; 0: off.", exclusiveMaximum=1),
    "top_a": number(0, 1, "Keep tokens above this times the largest probability squared; 0: off."),
    "typical_p": number(0, 1, "Keep the tokens nearest to the entropy, to this mass; 1: off.", exclusiveMinimum=0),
    "xtc_probability": number(0, 1, "How often XTC leaves the most likely tokens out; 0: off."),
    "xtc_threshold": number(0, 1, "What XTC takes for likely. Default 0.1."),
    "logit_bias": nullable(BIAS, "Added to the logits of these token ids."),
    "embedding_bias": nullable(
        {"type": "array", "minItems": 1, "items": {"type": "number", "minimum": -BINARY32, "maximum": BINARY32}},
        "One number for each token, added.",
    ),
    "repetition_penalty": number(0, 1e6, "On what occurred, prompt included; 1: off.", exclusiveMinimum=0),
    "presence_penalty": number(-2, 2, "Taken off tokens that the output has."),
    "frequency_penalty": number(-2, 2, "The same, once for each time."),
    "prompt_ignore_length": integer(0, "Both penalties count the prompt after so many tokens; unset: no prompt."),
    "bad_words": nullable(TEXTS, "Texts that may not come, as the tokenizer spells them, alone and after a space."),
    "bad_token_ids": nullable(SEQUENCES, "Token ids, or id sequences, that may not come."),
    "no_repeat_ngram_size": integer(0, "No run of so many tokens twice; 0: off."),
    "allowed_token_ids": nullable({**IDS, "minItems": 1}, "No other token may come."),
    "json": nullable({"anyOf": [*SCHEMA["anyOf"], TEXT]},
                     "The text is JSON of this schema. At most one of the six fields of structure is given."),
    "json_object": flag("The text is a JSON object."),
    "regex": string("The text is what this regular expression matches as a whole.", minLength=1),
    "choice": nullable({"type": "array", "items": TEXT, "minItems": 1, "maxItems": MAX_CHOICES, "uniqueItems": True},
                       "The text is one of them."),
    "grammar": string("The text is what this grammar derives: Lark, or EBNF with a rule named root.", minLength=1),
    "structural_tag": nullable({"anyOf": [TAG, TEXT]}, "Free text with structures between marks."),
    "json_whitespace": integer(0, "Spaces and line breaks in a row that JSON may have. Default 0: compact.", 16),
    "thinking_token_budget": integer(0, "Thinking ends after so many tokens."),
    "seed": nullable({"type": "integer", "minimum": -(2**63), "maximum": SEEDS},
                     "Decides every draw; unset: a fresh one, which the answer says. Prompt i of several: seed + i."),
    "n": integer(1, "Choices for each prompt. Default 1."),
    "max_tokens": integer(0, "Most tokens of a choice. 0 only scores the prompt."),
    "min_tokens": integer(0, "No end before so many tokens."),
    "stop": nullable(TEXTS, "Texts at which a choice ends."),
    "stop_token_ids": nullable(SEQUENCES, "Token ids, or id sequences, at which a choice ends."),
    "end_token_ids": nullable({"anyOf": [ID, IDS]}, "More end ids beside the model's own."),
    "ignore_eos": flag("The model's end ids end nothing."),
    "include_stop_str_in_output": flag("Keep the text of what stopped it."),
    "detokenize": flag("Return text. Default true."),
    "skip_special_tokens": flag("Hide special tokens in the text. Default true."),
    "spaces_between_special_tokens": flag("One space around shown special tokens."),
    "echo": flag("The prompt's text comes first."),
    "truncate_prompt_tokens": integer(1, "Keep the last so many tokens of the prompt."),
    "logprobs": integer(-1, "Logprobs of each sampled token and of so many most likely ones."),
    "prompt_logprobs": integer(-1, "The same of the prompt's tokens, in a field of its own."),
    "logprobs_mode": {"anyOf": [{"enum": ["raw", "processed"]}, {"type": "null"}],
                      "description": "raw: of the model's own row; processed: of what the token was drawn from."},
    "logprob_token_ids": nullable(IDS, "In the receipts: logprobs of these tokens as well."),
    "return_kept": flag("In the receipts: the ids that the filters left."),
    "return_probs": flag("In the receipts: those ids and their probabilities."),
}  # fmt: skip
"""Every field but NOT_OVER_HTTP."""

TRUE: Schema = {"const": True}
TOGETHER = [
    unless("top_p_min", beside=[given("top_p_decay")]),
    unless("top_p_reset_id", beside=[given("top_p_decay")]),
    unless("json_whitespace", 0, beside=[
        given("json"), given("json_object", TRUE), given("structural_tag"), given("response_format"),
    ]),
    unless("logprobs_mode", "raw", beside=[
        given("logprobs", {"type": "integer"}), given("logprobs", TRUE), given("logprob_token_ids"),
        given("return_receipts", TRUE),
    ]),
    unless("stream_options", beside=[given("stream", TRUE)]),
    {"anyOf": [{"properties": {"max_tokens": {"not": {"const": 0}}}}, given("prompt_logprobs"), given("logprobs")]},
]  # fmt: skip
"""What a schema can say of the rules between fields. The others are told by the errors alone."""


class Refused:
    """Marks a field of OpenAI's of which null and these values change nothing here, and any other is refused."""

    def __init__(self, why: str, *taken: Any) -> None:
        self.rule = f"{why}; leave it out" + (f", or give {', '.join(map(repr, taken))}" if taken else "")
        self.taken = (*taken, None)
        self.schema: Schema = {"enum": [*taken, None], "description": f"Anything else is refused: {why}."}

    def check(self, value: Any) -> Any:
        """The value, if it is one of those taken; True is no 1."""
        if any(type(value) is type(one) and value == one for one in self.taken):
            return value
        raise ValueError(self.rule)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        return self.schema
