"""Grammars made to take long, or much memory; run as a module, what comes of each: seconds, "works" or the error."""

from __future__ import annotations

import json
import sys
import time

from tests.grammar.bytewise import BACKEND, LOOP, allowed, schema
from tests.grammar.walks import END

from klero.errors import GrammarError
from klero.grammar import Source


def nested(depth):
    asked = {"type": "string"}
    for level in range(depth // 2):
        asked = {"type": "object", "properties": {f"p{level}": asked}, "required": [f"p{level}"]}
    return asked


ADVERSARIAL = {
    "alternatives": Source("regex", "(a|a)*b"),
    "nested stars": Source("regex", "((a*)*)*b"),
    "nested counts": Source("regex", "(a{1,1000}){1,1000}"),
    "subsets": Source("regex", "[ab]*a[ab]{20}"),
    "a long distance": Source("regex", "(?s:.*)a(?s:.){500}"),
    "a large count": Source("regex", "a{0,1000000000}"),
    "optional and not": Source("regex", "a?" * 1000 + "a" * 1000),
    "long": Source("regex", "(?:ab|c)d" * 20000),
    "deep groups": Source("regex", "(" * 50_000 + "a" + ")" * 50_000),
    "choices": Source("choice", json.dumps([f"word {i} {i * 7919 % 10007}" for i in range(10_000)])),
    "enum": schema({"enum": [f"word {i} {i * 7919 % 10007}" for i in range(10_000)]}),
    "deep schema": schema(nested(64)),
    "many properties": schema({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1000)}}),
    "many items": schema({"type": "array", "items": {"type": "array", "minItems": 4000}, "minItems": 4000}),
    "long strings": schema({"type": "string", "minLength": 1000, "maxLength": 32_768}),
    "loop": schema(LOOP),
    "doubling": schema({"$ref": "#/$defs/20", "$defs": {"0": {"type": "integer"}} | {
        str(i): {"allOf": [{"$ref": f"#/$defs/{i - 1}"}] * 2} for i in range(1, 21)}}),
    "product": schema({"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(4)]}
                                 for i in range(10)]}),
    "chain of rules": Source("grammar", "root ::= r0\n" + "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(5000))
                             + 'r5000 ::= "b"'),
    "deep rule": Source("grammar", "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "deep GBNF": Source("grammar", "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "ambiguous": Source("grammar", 'start: s\ns: s s s | s s | "a" | "b" | '),
    "chain of references": schema({"$ref": "#/$defs/0", "$defs": {"5000": {"type": "integer"}} | {
        str(i): {"properties": {"b": {"$ref": f"#/$defs/{i + 1}"}}, "type": "object"} for i in range(5000)}}),
    "patterns": schema({"type": "string", "allOf": [{"pattern": f".{{{i}}}x"} for i in range(22)]}),
    "patterns by references": schema({"$ref": "#/$defs/0", "$defs": {"22": {"type": "string"}} | {
        str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}], "pattern": f".{{{i}}}x"} for i in range(22)}}),
    "patterns of one property": schema({"allOf": [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": f".{{{i}}}x"}}} for i in range(22)]}),
    "patterns in Lark": Source("grammar", "start: %json " + json.dumps(
        {"type": "string", "allOf": [{"pattern": f".{{{i}}}x"} for i in range(22)]})),
    "two patterns": schema({"type": "string", "pattern": "a.{60}b.{60}$", "allOf": [{"pattern": "b.{61}a.{59}$"}]}),
    "a pattern and lengths": schema({"type": "string", "pattern": "^(.*a.{20}){3}$", "maxLength": 60}),
    "a pattern of names": schema({"type": "object", "patternProperties": {
        f"^a{i}x.{{{i}}}$": {} for i in range(16)}}),
    "patterns of names": schema({"type": "object", "patternProperties": {
        f"^a{i}x.{{{i}}}$": {} for i in range(1000)}}),
    "multiples": schema({"type": "number", "allOf": [{"multipleOf": 19_997}, {"multipleOf": 19_993}]}),
    "a multiple": schema({"type": "number", "multipleOf": 19_997}),
    "many multiples": schema({"type": "object", "properties": {
        f"p{i}": {"type": "integer", "multipleOf": 19_997 - i} for i in range(100)}}),
    "optional": Source("regex", "a?" * 60_000),
    "optional letters": Source("regex", r"\w?" * 1000),
    "letters": Source("regex", r"\w" * 100_000),
    "an open set": schema({"type": "string", "pattern": "[" * 100_000}),
    "doubling terminals": Source("grammar", 'start: T30\nT0: "a"?\n' + "".join(
        f"T{i}: T{i - 1} T{i - 1}\n" for i in range(1, 31))),
    "doubling GBNF": Source("grammar", 'root ::= t30\nt0 ::= "a"?\n' + "".join(
        f"t{i} ::= t{i - 1} t{i - 1}\n" for i in range(1, 31))),
    "doubling rules": Source("grammar", 'start: t20\nt0: "a"?\n' + "".join(
        f"t{i}: t{i - 1} t{i - 1}\n" for i in range(1, 21))),
    "many structures": Source("structural_tag", json.dumps({"triggers": ["<"], "structures": [
        {"begin": f"<{i}>", "schema": {"multipleOf": 19_997 - i}, "end": ""} for i in range(128)]})),
    "long triggers": Source("structural_tag", json.dumps({"triggers": [f"<{i:0900}>" for i in range(128)],
        "structures": [{"begin": f"<{i:0900}>", "schema": True, "end": ""} for i in range(128)]})),
    "many schemas in Lark": Source("grammar", "start: " + " | ".join(
        json.dumps({"multipleOf": 19_997 - i}).join(("%json ", "")) for i in range(128))),
    "pairs of patterns": schema({"type": "object", "properties": {
        f"p{i}": {"type": "string", "pattern": f"^[a-z ]+x{i}", "maxLength": 50 + i} for i in range(1000)}}),
    "required twice": schema({"$ref": "#/$defs/40", "$defs": {"0": {"type": "string"}} | {
        str(i): {"type": "object", "required": ["a", "a"], "properties": {"a": {"$ref": f"#/$defs/{i - 1}"}}}
        for i in range(1, 41)}}),
    "chain of terminals": Source("grammar", "start: T0\n" + "".join(f'T{i}: "a" T{i + 1}\n' for i in range(5000))
                                 + 'T5000: "b"'),
}  # fmt: skip

REFUSED = {
    "optional and not": "too many expressions", "long": "may have 32768 bytes", "deep groups": "may have 32768 bytes",
    "loop": "no JSON meets it", "deep rule": "too deeply nested", "deep GBNF": "nested 24 deep",
    "patterns": "22 of pattern, format and length", "patterns by references": "22 of pattern, format and length",
    "patterns of one property": "22 of pattern, format and length", "two patterns": "Unable to determine",
    "patterns in Lark": "22 of pattern, format and length", "a pattern and lengths": "Unable to determine",
    "patterns of names": "may have 128 in all", "multiples": "20000 at most", "many multiples": "100000 in all",
    "optional": "may have 32768 bytes", "optional letters": "too many expressions", "letters": "may have 32768 bytes",
    "an open set": "may have 8192 bytes", "doubling terminals": "too many pieces", "doubling GBNF": "too many pieces",
    "doubling rules": "max is 500", "product": "too large",
    "many structures": "100000 in all", "many schemas in Lark": "100000 in all", "required twice": "none of them twice",
}  # fmt: skip
"""What is said of those that cannot be followed; the others can."""


def outcome(name):
    """ "works" if twenty tokens can be written, or the rule of the error."""
    try:
        matcher = BACKEND.compile(ADVERSARIAL[name]).matcher((END,))
        for _ in range(20):
            found = sorted(allowed(matcher) - {END})
            if not found:
                break
            assert matcher.accept(found[len(found) // 2])
    except GrammarError as error:
        return error.rule
    return "works"


if __name__ == "__main__":
    BACKEND.compile(Source("regex", "a"))
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30,) * 2)
    for each in ADVERSARIAL:
        begin = time.process_time()
        found = outcome(each)
        print(json.dumps([each, time.process_time() - begin, found]), flush=True)
