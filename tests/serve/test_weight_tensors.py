"""Trainers that send tensors to a running server, as SGLang's clients do, with native kernels and with PyTorch."""

from __future__ import annotations

import base64
import io
import multiprocessing
import pickle
import socket
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, make_dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
import torch
import torch.multiprocessing as shared
from safetensors.torch import load_file, save_file
from torch.distributed import broadcast

from tests.serve.server import Server, serving

MODEL = Path(__file__).parent.parent / "hybrid" / "model"
NORM = "model.norm.weight"
PROJECTION = "model.layers.0.mlp.down_proj.weight"
PROMPT = "Returns the name of the"
Named = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module", params=["auto", "torch"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with serving("--model", str(MODEL), "--context-length", "256", "--kernels", request.param) as running:
        yield running
        running.audit()


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
        client.post("/update_weights_from_disk", json={"model_path": str(MODEL)}).raise_for_status()


@pytest.fixture(scope="module")
def old() -> dict[str, torch.Tensor]:
    return load_file(MODEL / "model.safetensors")


def plain(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def forked(value: Any) -> str:
    """Serializes as SGLang's `MultiprocessingSerializer`."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return base64.b64encode(buffer.getvalue()).decode()


def said(http: httpx.Client, session: str | None = None) -> str:
    body: dict[str, Any] = {"input": PROMPT, "max_new_tokens": 12, "stream": False}
    name = session or http.post("/v1/sessions", json={}).json()["id"]
    answer = http.post(f"/v1/sessions/{name}/turns", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["text"])


def sent(http: httpx.Client, tensors: Any, write: Callable[[Any], str] = plain, **fields: Any) -> httpx.Response:
    body = {"serialized_named_tensors": [write(tensors)], **fields}
    return http.post("/update_weights_from_tensor", json=body)


def weight(http: httpx.Client, name: str) -> Any:
    return http.post("/get_weights_by_name", json={"name": name, "truncate_size": 3}).raise_for_status().json()


def changed(old: dict[str, torch.Tensor]) -> Named:
    norm = old[NORM].clone()
    norm[::2] *= -1
    return [(NORM, norm), (PROJECTION, old[PROJECTION] * 0.5)]


def test_tensors_replace_those_in_use_and_nothing_computed_before_is_used(
    http: httpx.Client, old: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    session = http.post("/v1/sessions", json={}).json()["id"]
    first = said(http, session)
    new = changed(old)
    assert sent(http, new, flush_cache=False, weight_version="7").json()["success"] is True
    assert weight(http, PROJECTION) == new[1][1][:3].float().tolist()
    assert weight(http, NORM) == new[0][1][:3].float().tolist()
    with_new = said(http)
    assert with_new != first
    body = {"input": " and", "max_new_tokens": 1, "stream": False}
    turn = http.post(f"/v1/sessions/{session}/turns", json=body).json()
    assert turn["usage"]["cached_tokens"] == 0
    assert http.get("/get_model_info").json()["weight_version"] == "7"
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "config.json").write_bytes((MODEL / "config.json").read_bytes())
    save_file(old | dict(new), whole / "model.safetensors")
    http.post("/update_weights_from_disk", json={"model_path": str(whole)}).raise_for_status()
    assert said(http) == with_new


def test_updates_add_up_and_survive_a_release_of_the_weights(http: httpx.Client, old: dict[str, torch.Tensor]) -> None:
    (norm, projection), first = changed(old), said(http)
    assert sent(http, [norm]).status_code == sent(http, [projection]).status_code == 200
    both = said(http)
    http.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
    http.post("/release_memory_occupation").raise_for_status()
    assert sent(http, [norm]).status_code == 409  # there are no weights to replace
    http.post("/resume_memory_occupation").raise_for_status()
    http.post("/continue_generation").raise_for_status()
    assert said(http) == both
    assert weight(http, PROJECTION) == projection[1][:3].float().tolist()
    assert sent(http, [(NORM, old[NORM].float()), (PROJECTION, old[PROJECTION].float())]).status_code == 200
    assert said(http) == first


def test_memory_shared_by_name_is_read_and_strides_are_followed(
    http: httpx.Client, old: dict[str, torch.Tensor]
) -> None:
    before = shared.get_sharing_strategy()
    shared.set_sharing_strategy("file_system")
    try:
        turned = (old[PROJECTION] * 2).t().contiguous().t()
        assert not turned.is_contiguous()
        assert sent(http, [(PROJECTION, torch.nn.Parameter(turned, requires_grad=False))], forked).status_code == 200
        assert weight(http, PROJECTION) == (old[PROJECTION] * 2)[:3].float().tolist()
    finally:
        shared.set_sharing_strategy(before)


@pytest.fixture
def bucket_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the module of SGLang whose class a bucket names."""
    names = "sglang", "sglang.srt", "sglang.srt.weight_sync", "sglang.srt.weight_sync.tensor_bucket"
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    fields = ["name", "shape", "dtype", "start_idx", "end_idx", "numel"]
    kind = make_dataclass("FlattenedTensorMetadata", fields)
    kind.__module__ = names[-1]
    sys.modules[names[-1]].FlattenedTensorMetadata = kind  # type: ignore[attr-defined]
    return kind


def test_a_bucket_holds_tensors_of_several_types(
    http: httpx.Client, old: dict[str, torch.Tensor], bucket_module: Any
) -> None:
    tensors = changed(old)
    tensors[0] = (NORM, tensors[0][1].float())
    parts, described, at = [], [], 0
    for name, tensor in tensors:
        flat = tensor.flatten().view(torch.uint8)
        described.append(bucket_module(name, tensor.shape, tensor.dtype, at, at + flat.numel(), flat.numel()))
        parts.append(flat)
        at += flat.numel()
    bucket = {"flattened_tensor": torch.cat(parts), "metadata": described}
    answer = sent(http, bucket, load_format="flattened_bucket")
    assert answer.status_code == 200, answer.text
    assert weight(http, NORM) == tensors[0][1][:3].tolist()
    assert weight(http, PROJECTION) == tensors[1][1][:3].float().tolist()
    described[1].start_idx += 1
    refused = sent(http, bucket, load_format="flattened_bucket")
    assert refused.status_code == 400, refused.text


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


class Setting:
    """A pickle that sets an attribute of a function it may name."""

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_parameter, (1,), ({}, {"call": 1})


@dataclass
class Case:
    name: str
    tensors: Any
    code: str
    words: str
    write: Callable[[Any], str] = plain


CASES = [
    Case("function", [("x", Evil())], "invalid_request", "builtins.print"),
    Case("attribute", [("x", Setting())], "invalid_request", "cannot be read"),
    Case("no tensors", {"a": 1}, "invalid_request", "cannot be read"),
    Case("unknown", [("model.norms.weight", torch.zeros(3))], "invalid_request", "no tensor"),
    Case("shape", [(NORM, torch.zeros(3))], "invalid_request", "shape"),
    Case("type", [(NORM, torch.zeros(96, dtype=torch.int8))], "invalid_request", "I8"),
    Case("NaN", [(NORM, torch.full((128,), torch.nan))], "invalid_request", "NaN"),
    Case("rounded up", [(NORM, torch.full((128,), 3.4e38))], "invalid_request", "infinite values"),
    Case("descriptor", [(NORM, torch.ones(96))], "invalid_request", "file_system", forked),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_no_tensor_of_the_model_changes_nothing(
    http: httpx.Client, old: dict[str, torch.Tensor], case: Case
) -> None:
    tensors, norm = case.tensors, old[NORM]
    if case.name in ("type", "descriptor"):
        tensors = [(NORM, torch.zeros_like(norm, dtype=torch.int8) if case.name == "type" else norm)]
    if isinstance(tensors, list):
        tensors = [(PROJECTION, old[PROJECTION] * 3), *tensors]
    before, version = said(http), http.get("/get_model_info").json()["weight_version"]
    refused = sent(http, tensors, case.write)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["code"] == case.code
    assert case.words in refused.json()["error"]["message"], refused.text
    assert weight(http, PROJECTION) == old[PROJECTION][:3].float().tolist()
    assert (said(http), http.get("/get_model_info").json()["weight_version"]) == (before, version)


def test_damaged_bytes_are_refused(http: httpx.Client, old: dict[str, torch.Tensor]) -> None:
    good = pickle.dumps([(NORM, old[NORM])])
    for data in (b"", b"abc", good[:-40], good.replace(b"cpu", b"gpu")):
        body = {"serialized_named_tensors": [base64.b64encode(data).decode()]}
        assert http.post("/update_weights_from_tensor", json=body).status_code == 400
    assert http.post("/update_weights_from_tensor", json={"serialized_named_tensors": ["%%"]}).status_code == 400


def trainer(port: int, path: str, bucket: bool) -> None:
    """Broadcasts tensors from another process, with a group beside the default one, as trainers make theirs."""
    c10d: Any = import_module("torch.distributed.distributed_c10d")
    new = [(name, tensor) for name, tensor in torch.load(path).items()]
    wait = timedelta(seconds=120)
    store, rank, size = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=wait))
    group, _ = c10d._new_process_group_helper(
        size, rank, [], c10d.Backend("gloo"), c10d.PrefixStore("train", store), group_name="train", timeout=wait
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    if bucket:
        broadcast(torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in new]), 0, group)
    else:
        for _, tensor in new:
            broadcast(tensor.contiguous(), 0, group)


@contextmanager
def joined(http: httpx.Client, new: Named, path: Path, *, bucket: bool) -> Iterator[BaseProcess]:
    """Starts a trainer that broadcasts `new` once, and lets the server join its group, "train"."""
    torch.save(dict(new), path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=trainer, args=(port, str(path), bucket))
    process.start()
    try:
        group = {"group_name": "train", "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
        answer = http.post(
            "/init_weights_update_group", json={**group, "world_size": 2, "backend": "gloo"}, timeout=120
        )
        assert answer.status_code == 200, answer.text
        again = http.post("/init_weights_update_group", json={**group, "world_size": 2})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "already_exists")
        yield process
    finally:
        process.join(60)
        process.kill()


def received(http: httpx.Client, new: Named, *, bucket: bool = False, dtype: str = "") -> Any:
    """Asks the server to receive `new`, of types other than theirs if `dtype` is given."""
    body = {
        "group_name": "train",
        "names": [name for name, _ in new],
        "dtypes": [dtype or str(tensor.dtype).removeprefix("torch.") for _, tensor in new],
        "shapes": [list(tensor.shape) for _, tensor in new],
        "load_format": "flattened_bucket" if bucket else None,
    }
    return http.post("/update_weights_from_distributed", json=body, timeout=120)


@pytest.mark.parametrize("bucket", [False, True])
def test_a_trainer_in_another_process_broadcasts_tensors(
    http: httpx.Client, old: dict[str, torch.Tensor], tmp_path: Path, bucket: bool
) -> None:
    new = changed(old)
    with joined(http, new, tmp_path / "new", bucket=bucket) as process:
        answer = received(http, new, bucket=bucket)
        assert answer.status_code == 200, answer.text
        assert weight(http, PROJECTION) == new[1][1][:3].float().tolist()
        if bucket:
            process.join(60)  # the trainer is gone: nothing more comes
            failed = received(http, new, bucket=bucket)
            assert (failed.status_code, failed.json()["error"]["code"]) == (429, "overloaded"), failed.text
        else:
            assert http.post("/destroy_weights_update_group", json={"group_name": "train"}).status_code == 200
        assert weight(http, PROJECTION) == new[1][1][:3].float().tolist()
        gone = http.post("/destroy_weights_update_group", json={"group_name": "train"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("bucket", [False, True])
@pytest.mark.parametrize(
    ("dtype", "code"), [("float32", "invalid_request"), ("float8_e5m2", "overloaded"), ("complex64", "invalid_request")]
)
def test_a_trainer_that_sends_fewer_or_more_bytes_than_announced_changes_nothing(
    http: httpx.Client, old: dict[str, torch.Tensor], tmp_path: Path, dtype: str, code: str, bucket: bool
) -> None:
    new, before = changed(old), said(http)
    with joined(http, new, tmp_path / "new", bucket=bucket):
        refused = received(http, new, bucket=bucket, dtype=dtype)
        assert refused.json()["error"]["code"] == code, refused.text
        gone = received(http, new, bucket=bucket)  # not the tensors of the refused request
        assert gone.json()["error"]["code"] == "not_found", gone.text
        assert weight(http, PROJECTION) == old[PROJECTION][:3].float().tolist()
        assert said(http) == before


def test_a_trainer_that_never_comes_holds_nothing_else_up(http: httpx.Client) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    body = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "never",
    }

    def ask() -> None:
        with pytest.raises(httpx.TimeoutException):
            http.post("/init_weights_update_group", json=body, timeout=3)

    waiting = Thread(target=ask)
    waiting.start()
    assert said(http)
    assert weight(http, NORM)
    waiting.join()


def test_quantized_models_say_why_tensors_do_not_fit() -> None:
    with serving() as gguf, gguf.client() as http:
        refused = sent(http, [("model.norm.weight", torch.zeros(3))])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported"), refused.text
        assert refused.json()["error"]["message"]
