"""The `config.json` of a Hugging Face directory; values are checked when they are read."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from tenuto.base.errors import ModelError
from tenuto.models.rope import Rope, linear_divisors, llama3_divisors, longrope_magnitude, yarn_divisors, yarn_magnitude

_T = TypeVar("_T")
_LARGEST = sys.float_info.max
_ROPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises `ModelError` if the file is missing or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is missing or damaged ({error}); fetch the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object; fetch the model again")
    return value


class Settings:
    """The values of one JSON object, read from the file `source`. All methods raise `ModelError` for values that are
    missing or malformed."""

    def __init__(self, values: Mapping[str, Any], source: Path) -> None:
        self.source = source
        self._values = values

    def get(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        """Returns the value of `key`, which must be of type `kind`; an int is accepted as a float. `default` replaces a
        value that is null or missing."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if kind is float and type(value) is int and abs(value) <= _LARGEST:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(f"{self.source} has {key} = {value!r}; expected: {kind.__name__}")
        return value

    def optional(self, key: str, kind: type[_T]) -> _T | None:
        """Like `get`, but returns None for a value that is null or missing."""
        return None if self._values.get(key) is None else self.get(key, kind)

    def automatic(self, key: str, computed: int) -> int:
        """Returns an int; `computed` if the value is "auto" or missing."""
        return computed if self._values.get(key) in (None, "auto") else self.get(key, int)

    def numbers(self, key: str) -> list[int]:
        """Returns a list of ints, empty if the value is missing."""
        value = self._values.get(key) or []
        if not isinstance(value, list) or any(type(one) is not int for one in value):
            raise ModelError(f"{self.source} has {key} = {value!r}; expected: a list of int")
        return value

    def limits(self, key: str) -> tuple[float, float]:
        """Returns a minimum and a maximum; 0 and infinity if the value is missing. Files may write infinity, which JSON
        lacks, as an object."""
        value = self._values.get(key)
        pair = [0.0, math.inf] if value is None else value
        if not isinstance(pair, list) or len(pair) != 2:
            raise ModelError(f"{self.source} has {key} = {value!r}; expected: two numbers")
        least, most = (math.inf if isinstance(one, dict) else one for one in pair)
        if not all(type(one) in (int, float) for one in (least, most)):
            raise ModelError(f"{self.source} has {key} = {value!r}; expected: two numbers")
        return float(least), float(most)

    def kinds(self, key: str, default: list[str], known: tuple[str, ...]) -> list[str]:
        """Returns one name per layer, each from `known`. `default` replaces a missing value and gives the number of
        layers."""
        value = self._values.get(key) or default
        if not isinstance(value, list) or len(value) != len(default) or any(one not in known for one in value):
            raise ModelError(
                f"{self.source} has {key} = {value!r}; expected: {len(default)} names from {', '.join(known)}"
            )
        return value

    def part(self, key: str) -> Settings | None:
        """Returns the object under `key` as settings, or None if it is missing."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ModelError(f"{self.source} has {key} = {value!r}; expected: an object")
        return Settings(value, self.source)

    def parts(self, key: str) -> list[Settings]:
        """Returns the objects within the object under `key`; none if it is missing."""
        whole = Settings(self.get(key, dict, {}), self.source)
        return [part for name in self.get(key, dict, {}) if (part := whole.part(name)) is not None]

    def only(self, allowed: Mapping[str, tuple[object, ...]]) -> None:
        """Rejects models that need arithmetic we lack: raises `ModelError` unless each key has one of its `allowed`
        values; `None` stands for a missing one. The error names the last."""
        for key, values in allowed.items():
            if self._values.get(key) not in values:
                raise ModelError(f"{self.source} has {key} = {self._values.get(key)!r}; supported: {values[-1]!r}")

    def ids(self, key: str) -> set[int]:
        """Returns a set of token ids; the value may be one id, a list, or missing."""
        value = self._values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(one) is not int for one in ids):
            raise ModelError(f"{self.source} has {key} = {value!r}; expected: token ids")
        return set(ids)

    def head_dim(self) -> int:
        """Returns the number of elements of an attention head."""
        heads = self.get("num_attention_heads", int)
        return self.optional("head_dim", int) or self.get("hidden_size", int) // max(heads, 1)

    def window(self) -> int:
        """Returns the number of tokens that a token attends to, itself included. 0 means all tokens, and is also
        returned if the window covers the longest context."""
        window = self.get("sliding_window", int, 0)
        return window if window < self._longest() else 0

    def rope(self, head_dim: int, *, theta: float = 10000.0, share: float = 1.0) -> Rope:
        """Reads the rope from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before). `theta`
        and `share`, the fraction of a head that is rotated, are defaults."""
        context = self.get("max_position_embeddings", int)
        whole: dict[str, Any] = {
            "max_position_embeddings": context,
            "original_max_position_embeddings": self.get("original_max_position_embeddings", int, context),
        }
        values = self._values.get("rope_parameters")
        if values is None:
            whole["rope_theta"] = self.get("rope_theta", float, theta)
            whole["partial_rotary_factor"] = self.get("partial_rotary_factor", float, share)
            values = self.get("rope_scaling", dict, {})
        elif not isinstance(values, dict):
            raise ModelError(f"{self.source} has rope_parameters = {values!r}; expected: an object")
        return Settings(whole | values, self.source).rope_of(head_dim, share=share)

    def rope_kind(self) -> object:
        """Returns the kind of rope scaling. Call this on the settings of a rope, such as `rope_parameters`."""
        return self._values.get("rope_type") or self._values.get("type") or "default"

    def rope_of(self, head_dim: int, *, share: float = 1.0) -> Rope:
        """Reads the rope. Call this on the settings of a rope, such as `rope_parameters`."""
        theta = self.get("rope_theta", float)
        rotated = int(head_dim * self.get("partial_rotary_factor", float, share))
        match self.rope_kind():
            case "default" | "dynamic":  # dynamic scaling starts beyond `max_position_embeddings`, our limit
                return Rope(theta, linear_divisors(rotated, 1.0))
            case "linear":
                return Rope(theta, linear_divisors(rotated, self.get("factor", float)))
            case "llama3":
                divisors = llama3_divisors(
                    rotated,
                    theta,
                    factor=self.get("factor", float),
                    low_factor=self.get("low_freq_factor", float),
                    high_factor=self.get("high_freq_factor", float),
                    original_context=self.get("original_max_position_embeddings", int),
                )
                return Rope(theta, divisors)
            case "yarn":
                return self._yarn(rotated, theta)
            case "longrope" | "su":
                return self._longrope(rotated, theta)
            case other:
                raise ModelError(f"{self.source} has rope scaling {other!r}; supported: {', '.join(_ROPES)}")

    def _yarn(self, rotated: int, theta: float) -> Rope:
        factor = self.get("factor", float)
        divisors = yarn_divisors(
            rotated,
            theta,
            factor,
            self.get("original_max_position_embeddings", int),
            fast=self.get("beta_fast", float, 32.0),
            slow=self.get("beta_slow", float, 1.0),
            whole=self.get("truncate", bool, default=True),
        )
        usual = yarn_magnitude(factor, self.optional("mscale", float), self.optional("mscale_all_dim", float))
        return Rope(theta, divisors, self.get("attention_factor", float, usual))

    def _longrope(self, rotated: int, theta: float) -> Rope:
        original = self.get("original_max_position_embeddings", int)
        factor = self.get("factor", float, self.get("max_position_embeddings", int) / max(original, 1))
        return Rope(
            theta,
            self._divisors("short_factor", rotated),
            self.get("attention_factor", float, longrope_magnitude(factor, original)),
            self._divisors("long_factor", rotated),
            original,
        )

    def _divisors(self, key: str, rotated: int) -> tuple[float, ...]:
        """Returns one divisor per rotated pair."""
        value, pairs = self.get(key, list), len(linear_divisors(rotated, 1.0))
        if len(value) != pairs or any(type(one) not in (int, float) for one in value):
            raise ModelError(f"{self.source} has {key} = {value!r}; expected: {pairs} numbers")
        return tuple(float(one) for one in value)

    def _longest(self) -> int:
        """Returns the longest context, including an extension by YaRN, which `max_position_embeddings` may not
        reflect."""
        made_for = self.get("max_position_embeddings", int)
        scaling = self.part("rope_parameters") or self.part("rope_scaling") or Settings({}, self.source)
        original = scaling.optional("original_max_position_embeddings", int)
        if original is None or scaling.rope_kind() != "yarn":
            return made_for
        return max(made_for, int(original * scaling.get("factor", float)))

    def facts(
        self, eos: tuple[int, ...], *, tied: bool = False, norm_eps: float | None = None, context: int | None = None
    ) -> dict[str, Any]:
        """Returns the fields of `ModelConfig` whose keys are the same in all families. `tied` is a default; `norm_eps`
        and `context` replace values that a family stores under other keys."""
        return {
            "hidden": self.get("hidden_size", int),
            "vocab": self.get("vocab_size", int),
            "norm_eps": self.get("rms_norm_eps", float) if norm_eps is None else norm_eps,
            "tied": self.get("tie_word_embeddings", bool, tied),
            "max_context": self._longest() if context is None else context,
            "eos": eos,
            "bos": self.optional("bos_token_id", int),
            "dtype": str(self._values.get("dtype") or self._values.get("torch_dtype") or "float32"),
        }
