"""The model of a running engine, whose memory can be released and whose weights can be replaced."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from tenuto.base.config import EngineConfig
from tenuto.base.errors import ConfigError, InvalidRequest, ModelError, Overloaded
from tenuto.base.plan import Weights
from tenuto.base.wire.messages import ReleaseMemory, ResumeMemory, UpdateWeights
from tenuto.engine.engine import Engine
from tenuto.engine.thread.dispatcher import Dispatcher
from tenuto.engine.thread.loop import EngineLoop
from tenuto.runtime.models import Model


class LoadedModel:
    """Reads weights outside the engine's thread and makes the engine use them. `model` is the model with the weights in
    use. Only `execute` changes it, and only one thread may call that."""

    def __init__(self, model: Model, config: EngineConfig, loop: EngineLoop, dispatcher: Dispatcher) -> None:
        self.model = model
        self._config = config
        self._loop = loop
        self._dispatcher = dispatcher

    @cached_property
    def fingerprint(self) -> str:
        """See `Model.fingerprint`. Replacing the weights does not change it."""
        return self.model.fingerprint

    def execute(self, request: ReleaseMemory | ResumeMemory | UpdateWeights) -> None:
        """Releases memory, allocates it again, or replaces the weights. Raises `Overloaded` if memory is short, and
        `InvalidRequest` if the weights cannot be used."""
        match request:
            case ReleaseMemory():
                self._loop.call(lambda _: self._dispatcher.execute(request)).result()
            case ResumeMemory():
                self._resume(request)
            case UpdateWeights():
                self._update(request)

    def _resume(self, request: ResumeMemory) -> None:
        released = self._loop.call(lambda engine: engine.occupation.released).result()
        if "weights" not in request.parts or "weights" not in released:
            self._use(None, lambda engine: engine.occupation.restore(request.parts))
            return
        model = self.model.with_weights(None)
        weights = model.executor.load(None)
        same = model.weights.stamps == self.model.weights.stamps  # the files may have been replaced meanwhile
        changed = None if same else model.tier_identity(self._config)
        self._use(weights, lambda engine: engine.occupation.restore(request.parts, weights, changed))
        if not same:
            self.model = model

    def _update(self, request: UpdateWeights) -> None:
        try:
            model = self.model.with_weights(request.path)
            weights = model.executor.load(request.path)
            identity = model.tier_identity(self._config)
        except (ModelError, ConfigError, OSError) as error:
            raise InvalidRequest(
                f"the weights at {request.path!r} cannot be used: {error}; allowed: a whole model of the same shape",
                param="model_path",
            ) from error
        self._use(weights, lambda engine: engine.occupation.update(weights, identity, abort=request.abort))
        self.model = model

    def _use(self, weights: Weights | None, work: Callable[[Engine], None]) -> None:
        """Runs `work`, which makes the engine use `weights`, in the engine's thread; closes the weights if that fails.
        Raises `Overloaded` if memory is short."""
        try:
            self._loop.call(work).result()
        except BaseException as error:
            if weights is not None:
                weights.close()
            if isinstance(error, ConfigError):
                raise Overloaded(f"there is not enough memory at present: {error.message}") from error
            raise
