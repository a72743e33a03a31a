"""The `config.json` of a Hugging Face directory: values are checked when they are read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from tenuto.base.errors import ModelError
from tenuto.models.rope import (
    Rope,
    linear_divisors,
    llama3_divisors,
    longrope_magnitude,
    yarn_divisors,
    yarn_magnitude,
)

_T = TypeVar("_T")
_ROPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `ModelError` if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is missing or damaged ({error}); fetch the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object; fetch the model again")
    return value


class Settings:
    """Named values of one JSON object, `source` being where it was read. All methods raise `ModelError` for values that
    are not there or not as they must be."""

    def __init__(self, values: Mapping[str, Any], source: Path) -> None:
        self.source = source
        self._values = values

    def get(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        """The value of `key`, which must be of type `kind`; an int may stand for a float. `default` stands for a value
        that is null or not there."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(f"{self.source} has {key} = {value!r}; expected: {kind.__name__}")
        return value

    def optional(self, key: str, kind: type[_T]) -> _T | None:
        """As `get`, or `None`."""
        return None if self._values.get(key) is None else self.get(key, kind)

    def automatic(self, key: str, computed: int) -> int:
        """An int; `computed` if it is "auto" or not there."""
        return computed if self._values.get(key) in (None, "auto") else self.get(key, int)

    def numbers(self, key: str) -> list[int]:
        """A list of ints, empty if it is not there."""
        value = self._values.get(key) or []
        if not isinstance(value, list) or any(type(one) is not int for one in value):
            raise ModelError(f"{self.source} has {key} = {value!r}; expected: a list of int")
        return value

    def limits(self, key: str) -> tuple[float, float]:
        """The least and the most of something; 0 and infinity if they are not there. Infinity may be an object: JSON
        does not know it."""
        value = self._values.get(key)
        pair = [0.0, math.inf] if value is None else value
        if not isinstance(pair, list) or len(pair) != 2:
            raise ModelError(f"{self.source} has {key} = {value!r}; expected: two numbers")
        least, most = (math.inf if isinstance(one, dict) else one for one in pair)
        if not all(type(one) in (int, float) for one in (least, most)):
            raise ModelError(f"{self.source} has {key} = {value!r}; expected: two numbers")
        return float(least), float(most)

    def kinds(self, key: str, default: list[str], known: tuple[str, ...]) -> list[str]:
        """A name for each of as many layers as `default` has, each one of `known`."""
        value = self._values.get(key) or default
        if not isinstance(value, list) or len(value) != len(default) or any(one not in known for one in value):
            raise ModelError(f"{self.source} has {key} = {value!r}; expected: {len(default)} of {', '.join(known)}")
        return value

    def part(self, key: str) -> Settings | None:
        """The object that is the value of `key`, if there is one."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ModelError(f"{self.source} has {key} = {value!r}; expected: an object")
        return Settings(value, self.source)

    def only(self, allowed: Mapping[str, tuple[object, ...]]) -> None:
        """Refuse values that need other arithmetic than we have; the last of the `allowed` ones is named."""
        for key, values in allowed.items():
            if self._values.get(key) not in values:
                raise ModelError(f"{self.source} has {key} = {self._values.get(key)!r}; supported: {values[-1]!r}")

    def ids(self, key: str) -> set[int]:
        """A token id, several or none."""
        value = self._values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(one) is not int for one in ids):
            raise ModelError(f"{self.source} has {key} = {value!r}; expected: token ids")
        return set(ids)

    def head_dim(self) -> int:
        """Elements of an attention head."""
        heads = self.get("num_attention_heads", int)
        return self.optional("head_dim", int) or self.get("hidden_size", int) // max(heads, 1)

    def window(self) -> int:
        """Tokens that one attends to, itself included; 0, all, also where the window is as long as any context."""
        window = self.get("sliding_window", int, 0)
        return window if window < self._longest() else 0

    def rope(self, head_dim: int, *, theta: float = 10000.0, share: float = 1.0) -> Rope:
        """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before). `theta`, and the `share`
        of a head that is rotated, are what a model means that does not say."""
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
        """How these settings, if they are those of a rope, scale it."""
        return self._values.get("rope_type") or self._values.get("type") or "default"

    def rope_of(self, head_dim: int, *, share: float = 1.0) -> Rope:
        """If these settings are those of a rope."""
        theta = self.get("rope_theta", float)
        rotated = int(head_dim * self.get("partial_rotary_factor", float, share))
        match self.rope_kind():
            case "default" | "dynamic":  # the latter changes nothing within `max_position_embeddings`, our limit
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
        """One for each of the rotated pairs."""
        value, pairs = self.get(key, list), len(linear_divisors(rotated, 1.0))
        if len(value) != pairs or any(type(one) not in (int, float) for one in value):
            raise ModelError(f"{self.source} has {key} = {value!r}; expected: {pairs} numbers")
        return tuple(float(one) for one in value)

    def _longest(self) -> int:
        """The longest context: what the model was made for, or what YaRN extends that to, which `config.json` need not
        have taken into account."""
        made_for = self.get("max_position_embeddings", int)
        scaling = self.part("rope_parameters") or self.part("rope_scaling") or Settings({}, self.source)
        original = scaling.optional("original_max_position_embeddings", int)
        if original is None or scaling.rope_kind() != "yarn":
            return made_for
        return max(made_for, int(original * scaling.get("factor", float)))

    def facts(
        self, eos: tuple[int, ...], *, tied: bool = False, norm_eps: float | None = None, context: int | None = None
    ) -> dict[str, Any]:
        """What all families say of the whole model in the same words, as fields of `ModelConfig`; `tied` is what they
        mean if they do not say. `norm_eps` and `context`, if a family says that in other words."""
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
