"""The model of a running engine, whose memory can be released and whose weights can be replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from tenuto.base.config import EngineConfig, cache_dir
from tenuto.base.errors import ConfigError, IllegalTransition, InvalidRequest, ModelError, Overloaded, Unsupported
from tenuto.base.plan import Weights
from tenuto.base.views import AdapterView, WeightsView
from tenuto.base.wire.trainer_messages import (
    GetWeight,
    LoadAdapter,
    NewWeights,
    ReleaseMemory,
    ResumeMemory,
    UpdateWeights,
)
from tenuto.engine.engine import Engine
from tenuto.engine.thread.dispatcher import Dispatcher
from tenuto.engine.thread.loop import EngineLoop
from tenuto.formats.tensor_pickle import NamedTensor
from tenuto.runtime.models import Model

if TYPE_CHECKING:
    from tenuto.models.store import ModelFiles
    from tenuto.models.updates import UpdatedModels

T = TypeVar("T")


class LoadedModel:
    """Reads weights outside the engine's thread and makes the engine use them. `model` is the model with the weights in
    use: it changes in the engine's thread together with them, so that no work there finds one without the other. Only
    one thread may call `execute`."""

    def __init__(self, model: Model, config: EngineConfig, loop: EngineLoop, dispatcher: Dispatcher) -> None:
        self.model = model
        self._config = config
        self._loop = loop
        self._dispatcher = dispatcher
        self._path = model.path  # where the weights in use are; "" for the witness, which has no weights
        self._updated: UpdatedModels | None = None

    @cached_property
    def fingerprint(self) -> str:
        """See `Model.fingerprint`. Replacing the weights does not change it."""
        return self.model.fingerprint

    def execute(self, request: ReleaseMemory | ResumeMemory | UpdateWeights) -> WeightsView | None:
        """Releases memory, allocates it again, or replaces the weights and describes them. Raises `Overloaded` if
        memory is short, and `InvalidRequest` if the weights cannot be used."""
        match request:
            case ReleaseMemory():
                self._loop.call(lambda _: self._dispatcher.execute(request)).result()
            case ResumeMemory():
                self._resume(request)
            case UpdateWeights():
                return self._update(request.path, request.use)
        return None

    def load_adapter(self, request: LoadAdapter) -> AdapterView:
        """Reads an adapter and loads it. Raises `InvalidRequest` if it cannot be used, and the errors of
        `AdapterOperations.load`."""
        try:
            weights = self.model.executor.read_adapter(request.path)
        except (ModelError, ConfigError, OSError) as error:
            said = f"the adapter at {request.path!r} cannot be used: {error}"
            raise InvalidRequest(said, param="lora_path") from error
        loaded: AdapterView = self._loop.call(
            lambda engine: engine.adapters.load(request.name, request.path, weights, replace=request.replace)
        ).result()
        return loaded

    def _resume(self, request: ResumeMemory) -> None:
        released = self._loop.call(lambda engine: engine.occupation.released).result()
        if "weights" not in request.parts or "weights" not in released:
            self._use(None, lambda engine: engine.occupation.restore(request.parts))
            return
        model = self.model.with_weights(None)
        weights = model.executor.load(None)
        same = model.weights.stamps == self.model.weights.stamps  # the files may have been replaced meanwhile
        changed = None if same else model.tier_identity(self._config)

        def restore(engine: Engine) -> None:
            engine.occupation.restore(request.parts, weights, changed)
            if not same:
                self.model = model

        self._use(weights, restore)

    def replace(self, tensors: Mapping[str, NamedTensor], use: NewWeights) -> WeightsView:
        """Makes the engine use `tensors` in place of those of the weights in use. Raises like `execute`, and
        `Unsupported` for quantized weights; then nothing has changed."""
        from tenuto.models.updates import UpdatedModels  # noqa: PLC0415 - the witness does not need it

        files = self._files()
        if self._updated is None:
            self._updated = UpdatedModels()
        try:
            directory = self._updated.write(files, tensors)
            replaced = self._update(str(directory), use, param=None)
        except (ModelError, OSError) as error:
            self._updated.discard()
            raise InvalidRequest(f"the tensors cannot be used: {error}") from error
        except BaseException:
            self._updated.discard()
            raise
        self._updated.keep(directory)
        return replaced

    def weight(self, request: GetWeight) -> list[Any]:
        """Returns the first numbers or rows of a tensor of the weights in use. Raises `InvalidRequest`."""
        from tenuto.models.updates import tensor_of  # noqa: PLC0415 - the witness does not need it

        values = tensor_of(self._files(), request.name).select(slice(request.most)).decode()
        return list(values.tolist())

    def close(self) -> None:
        """Removes the files written for replaced tensors."""
        if self._updated is not None:
            self._updated.close()

    def _files(self) -> ModelFiles:
        """Returns the files of the weights in use. Raises `IllegalTransition` if they have been rewritten, and
        `Unsupported` if the model has no files."""
        from tenuto.models.store import resolve  # noqa: PLC0415 - the witness does not need it

        if not self._path:
            raise Unsupported(f"the model {self.model.name!r} has no weights; allowed: models with files")
        try:
            same = self.model.weights.again().stamps == self.model.weights.stamps
        except OSError:
            same = False
        if not same:
            raise IllegalTransition(
                f"the files at {self._path} have changed since they were read; update to whole weights from disk first"
            )
        return resolve(self._path, cache_dir())

    def _update(self, path: str, use: NewWeights, param: str | None = "model_path") -> WeightsView:
        try:
            model = self.model.with_weights(path)
            weights = model.executor.load(path)
            identity = model.tier_identity(self._config)
        except (ModelError, ConfigError, OSError) as error:
            raise InvalidRequest(
                f"the weights at {path!r} cannot be used: {error}; allowed: a whole model of the same shape",
                param=param,
            ) from error

        def update(engine: Engine) -> str:
            version = engine.occupation.update(
                weights, identity, version=use.version, abort=use.abort, keep_state=use.keep_state
            )
            self.model, self._path = model, path if model.path else ""
            return version

        return WeightsView(weight_version=self._use(weights, update))

    def _use(self, weights: Weights | None, work: Callable[[Engine], T]) -> T:
        """Runs `work`, which makes the engine use `weights`, in the engine's thread, and returns its result; closes the
        weights if that fails. Raises `Overloaded` if memory is short."""
        try:
            return self._loop.call(work).result()
        except BaseException as error:
            if weights is not None:
                weights.close()
            if isinstance(error, ConfigError):
                raise Overloaded(f"there is not enough memory at present: {error.message}") from error
            raise
