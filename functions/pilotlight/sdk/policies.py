"""Options for retries, schedules, fallbacks and variants, and their conversion to the records of
`pilotlight.spec.policies`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.sdk.unsupported import not_supported
from pilotlight.spec.engines import GuardSpec
from pilotlight.spec.features.schema import FeatureSchema, FeatureType
from pilotlight.spec.features.sources import DEFAULT_URL_VARIABLE, FeaturesSpec, RedisFeatures
from pilotlight.spec.function import FunctionNetwork
from pilotlight.spec.monitor import MonitoredFeature, MonitorSpec, Reference
from pilotlight.spec.policies import (
    DEFAULT_CACHE_BYTES,
    Fallback,
    MissedRunPolicy,
    ModelCard,
    Objectives,
    ResponseCacheSpec,
    RetryPolicy,
    RolloutStrategy,
    RolloutTerms,
    Schedule,
    Variant,
    parse_ttl,
    require_in_range,
)
from pilotlight.spec.prediction_log import (
    HOUR_S,
    RAW_KEEP_S,
    SUMMARY_KEEP_S,
    Content,
    PredictionLogSpec,
    parse_window,
)

__all__ = [
    "Cron",
    "Monitor",
    "Period",
    "PredictionLog",
    "Redis",
    "ResponseCache",
    "Retries",
    "cached_answer",
    "resolve_policies",
    "static_answer",
]


def Retries(
    max_retries: int,
    *,
    backoff_coefficient: float = 2.0,
    initial_delay: float = 1.0,
    max_delay: float = 60.0,
    jitter: float = 1.0,
    exceptions: Sequence[type[BaseException] | str] = (),
) -> RetryPolicy:
    """Retry failed calls with exponential backoff: `@app.function(retries=pilotlight.Retries(3))`.

    Args:
        max_retries: maximum number of attempts after the first one.
        backoff_coefficient: factor by which each delay exceeds the previous one.
        initial_delay: first delay, in seconds.
        max_delay: longest delay, in seconds.
        jitter: share of a delay that is random: 1 is "full jitter", 0 none.
        exceptions: what the function must raise for a retry, as types or names, with their
            subclasses: `exceptions=[ConnectionError, "requests.exceptions.Timeout"]`; () = any
            exception. A call whose instance crashed is retried in any case.

    Raises InvalidInput for a value out of range."""
    return RetryPolicy(
        max_retries=max_retries,
        backoff_coefficient=backoff_coefficient,
        initial_delay_s=initial_delay,
        max_delay_s=max_delay,
        jitter=jitter,
        exceptions=tuple(one if isinstance(one, str) else _type_name(one) for one in exceptions),
    )


def _type_name(kind: type[BaseException]) -> str:
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        raise InvalidInput(
            f"Retries(exceptions=[{kind!r}]): must be types of exceptions, or their names",
            parameter="retries",
        )
    own = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if own else f"{kind.__module__}.{kind.__qualname__}"


def Cron(
    cron: str,
    *,
    timezone: str = "UTC",
    missed: str = MissedRunPolicy.SKIP,
    method: str = "",
    arguments: Any = None,
) -> Schedule:
    """Call the function on a cron schedule: `schedule=pilotlight.Cron("0 6 * * *")`.

    Args:
        cron: expression with five fields: minute, hour, day of month, month, day of week.
        timezone: IANA name of the time zone of the expression.
        missed: for runs missed while the platform was down: "skip" them, or "catch_up" with one
            call for all.
        method: method to call; only for a class.
        arguments: JSON arguments of each call."""
    return Schedule(
        cron=cron, timezone=timezone, missed=_missed(missed), method=method, arguments=arguments
    )


def Period(
    *,
    weeks: float = 0,
    days: float = 0,
    hours: float = 0,
    minutes: float = 0,
    seconds: float = 0,
    missed: str = MissedRunPolicy.SKIP,
    method: str = "",
    arguments: Any = None,
    **modal_units: float,
) -> Schedule:
    """Call the function at a fixed interval, counted from the deploy: `pilotlight.Period(hours=1)`.

    The interval is the sum of `weeks`, `days`, `hours`, `minutes` and `seconds`. `missed`, `method`
    and `arguments` are as in `Cron`. Months and years, which differ in length, raise
    NotSupported."""
    for unit, count in modal_units.items():
        if unit not in ("months", "years"):
            raise InvalidInput(f"Period({unit}=…): unknown unit", parameter=unit)
        if count:
            raise not_supported(f"Period({unit}=…)")
    period_s = weeks * 604_800 + days * 86_400 + hours * 3600 + minutes * 60 + seconds
    return Schedule(
        period_s=float(period_s), missed=_missed(missed), method=method, arguments=arguments
    )


def PredictionLog(
    *,
    sample: float = 0.1,
    inputs: str = Content.SUMMARY,
    outputs: str = Content.SUMMARY,
    scrub: Sequence[str] = (),
    keep: str | None = None,
) -> PredictionLogSpec:
    """Log a share of the calls as rows of Parquet files, which `pilotlight log query` reads:
    `@app.function(log=pilotlight.PredictionLog(sample=0.1, scrub=["$.user.email"]))`.

    Args:
        sample: share of the answered calls that are logged, above 0 and at most 1.
        inputs: what is logged of the arguments: "none", "summary" (types, lengths and numbers, no
            text) or "full".
        outputs: the same for the result.
        scrub: JSON paths whose values are replaced before anything is written: `$.user.email`,
            `$.items[*].card`, `$..password`.
        keep: how long rows are stored, such as "12h" or "7d"; None = "7d" with "full" inputs or
            outputs, else "90d".

    Raises InvalidInput for a value out of range."""
    contents = {"inputs": inputs, "outputs": outputs}
    for name, given in contents.items():
        if given not in list(Content):
            raise InvalidInput(
                f"log: {name} = {given!r}: must be one of {', '.join(Content)}", parameter="log"
            )
    if isinstance(scrub, str) or not all(isinstance(path, str) for path in scrub):
        raise InvalidInput(
            f'log: scrub = {scrub!r}: must be a list of paths, such as ["$.user.email"]',
            parameter="log",
        )
    require_in_range("sample", sample, 0, 1)
    if keep is None:
        keep_s = RAW_KEEP_S if Content.FULL in contents.values() else SUMMARY_KEEP_S
    else:
        keep_s = parse_window(keep)
    return PredictionLogSpec(
        sample=float(sample),
        inputs=Content(inputs),
        outputs=Content(outputs),
        scrub=tuple(scrub),
        keep_s=keep_s,
    )


def ResponseCache(
    ttl: str | float, *, max_bytes: int = DEFAULT_CACHE_BYTES, shared: bool = False
) -> ResponseCacheSpec:
    """Answer equal calls of one tenant from memory, without running them again:
    `@app.function(cache=pilotlight.ResponseCache("1h"))`. For functions whose result depends on
    their arguments alone, and language models at temperature 0.

    Args:
        ttl: how long an answer is served: "30s", "5m", "1h", "7d", or seconds; at most 30 days.
        max_bytes: memory for this function's answers in each activator, 1 MiB to 1 GiB. The
            longest unused of the tenant with the most are dropped first.
        shared: activators that share a Redis also share answers in it.

    Raises InvalidInput for a value out of range."""
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int):
        raise InvalidInput(
            f"cache: max_bytes = {max_bytes!r}: must be a number of bytes", parameter="cache"
        )
    return ResponseCacheSpec(ttl_s=parse_ttl(ttl), max_bytes=max_bytes, shared=bool(shared))


def Monitor(
    *,
    features: Sequence[str]
    | Mapping[str, tuple[float | None, float | None] | None]
    | FeatureSchema = (),
    prediction: str = "",
    label: str = "",
    positive: str = "",
    slices: Sequence[str] = (),
    reference: str = Reference.BASELINE,
    window: str = "24h",
    min_rows: int = 500,
    psi: float = 0.25,
    ks: float = 0.1,
    shares: float = 0.05,
    alpha: float = 0.01,
    quality: Mapping[str, float] | None = None,
) -> MonitorSpec:
    """Watch the logged calls of a function for drift, and for the quality of its predictions:
    `@app.function(log=…, monitor=pilotlight.Monitor(features=["$.age"], prediction="$.score"))`.

    Args:
        features: JSON paths to up to 32 arguments, such as `$.customer.age`; as a dict, each with
            its expected range, such as {"$.age": (0, 120), "$.country": None}; or a schema of
            arguments: all of its features but lists.
        prediction: path to the prediction in the result, such as `$.score`; `$` is all of it.
        label: metric of `POST /v1/feedback` that says what was right: "label" for its labels.
        positive: label whose probability the prediction is, such as "fraud".
        slices: paths to up to 4 arguments, for each value of which quality is measured.
        reference: "baseline" (`pilotlight drift baseline`), or "previous": the window before.
        window: from "1h" to "7d"; each is judged once.
        min_rows: logged calls that a window needs, at least 100.
        psi: population stability index that is drift.
        ks: Kolmogorov-Smirnov distance that is drift.
        shares: increase of the share of missing values, or of those out of range, that is drift.
        alpha: greatest probability of a false alarm in a window.
        quality: bounds: {"accuracy": 0.9} at least, {"brier": 0.1}, "absolute_error" or
            "squared_error" at most.

    Raises InvalidInput for a value out of range."""
    for name, given in (("features", features), ("slices", slices)):
        if isinstance(given, str):
            raise InvalidInput(
                f'monitor: {name} = {given!r}: must be a list of paths, such as ["$.age"]',
                parameter="monitor",
            )
    if reference not in list(Reference):
        raise InvalidInput(
            f"monitor: reference = {reference!r}: must be one of {', '.join(Reference)}",
            parameter="monitor",
        )
    ranges: Mapping[str, Any]
    if isinstance(features, FeatureSchema):
        plain = [one for one in features.features if one.type is not FeatureType.LIST]
        ranges = {f"$.{one.name}": (one.low, one.high) for one in plain}
    else:
        ranges = features if isinstance(features, Mapping) else dict.fromkeys(features)
    return MonitorSpec(
        features=tuple(_feature(path, bounds) for path, bounds in ranges.items()),
        prediction=prediction,
        label=label,
        positive=positive,
        slices=tuple(slices),
        reference=Reference(reference),
        window_h=parse_window(window, where="monitor: window", parameter="monitor") // HOUR_S,
        min_rows=min_rows,
        psi=psi,
        ks=ks,
        shares=shares,
        alpha=alpha,
        quality=dict(quality or {}),
    )


def _feature(path: str, bounds: Any) -> MonitoredFeature:
    try:
        low, high = (None if one is None else float(one) for one in bounds or (None, None))
    except (TypeError, ValueError) as e:
        raise InvalidInput(
            f"monitor: range of {path!r} = {bounds!r}: must be two numbers, such as (0, 120)",
            parameter="monitor",
        ) from e
    return MonitoredFeature(path=path, low=low, high=high)


def Redis(
    key: str,
    schema: FeatureSchema,
    *,
    url: str = DEFAULT_URL_VARIABLE,
    deadline_ms: float = 20.0,
    max_age: float | None = None,
    timestamp: str = "updated_at",
) -> RedisFeatures:
    """Read features of an entity when the function is called, as its parameter `features`:
    `@app.function(features=pilotlight.Redis("user:{user_id}", USER, max_age=3600))`.

    The value of a key is a JSON object with the features by name. What cannot be read in time, is
    too old or does not fit the schema is replaced by its default; the answer is then marked
    (`Pilotlight-Degraded: features=…`), and never fails by it.

    Args:
        key: template with names of the function's parameters. `source.key_of(user_id="ada")` is
            the key to write to.
        schema: the features, each with a default or nullable.
        url: name of the environment variable with the address, such as redis://:password@host:6379/0
            or rediss://…; set it by a secret.
        deadline_ms: how long a call waits, 1 to 1,000 milliseconds.
        max_age: greatest age in seconds of a value, by its member `timestamp`; None = any.
        timestamp: seconds since the epoch, or text as of RFC 3339.

    Raises InvalidInput for a value out of range."""
    if not isinstance(schema, FeatureSchema):
        raise InvalidInput(
            f"features: {schema!r}: expected pilotlight.FeatureSchema(…)", parameter="features"
        )
    return RedisFeatures(
        key=key,
        schema=schema,
        url=url,
        deadline_ms=deadline_ms,
        max_age_s=max_age,
        timestamp=timestamp,
    )


def cached_answer(*, max_age: float = 3600.0) -> Fallback:
    """Fall back to the last successful answer to the same arguments, if it is at most `max_age`
    seconds old."""
    return Fallback(kind="cached", max_age_s=max_age)


def static_answer(body: Any, *, status: int = 200) -> Fallback:
    """Fall back to a fixed answer: `body` as JSON, with HTTP status `status`."""
    return Fallback(kind="static", body=body, status=status)


def resolve_policies(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the policies among the keywords of a declaration to fields of a FunctionSpec. Raises
    InvalidInput naming the keyword."""
    retries = values.get("retries")
    if isinstance(retries, int) and not isinstance(retries, bool):
        retries = Retries(retries)
    return {
        "retries": _one("retries", retries, RetryPolicy, "a number, or pilotlight.Retries(…)"),
        "schedules": _several(
            "schedule",
            values.get("schedule"),
            Schedule,
            "pilotlight.Cron(…) or pilotlight.Period(…)",
        ),
        "fallback": tuple(
            Fallback(kind="function", function=rung) if isinstance(rung, str) else rung
            for rung in _several(
                "fallback",
                values.get("fallback"),
                Fallback | str,
                "a function's name, or pilotlight.static_answer(…)",
            )
        ),
        "variants": tuple(
            Variant(function=rung) if isinstance(rung, str) else rung
            for rung in _several(
                "variants",
                values.get("variants"),
                Variant | str,
                "a function's name, or pilotlight.Variant(…)",
            )
        ),
        "objectives": _one(
            "objectives", values.get("objectives"), Objectives, "pilotlight.Objectives(…)"
        ),
        "require": _require(values.get("require") or {}),
        "card": _one("card", values.get("card"), ModelCard, "pilotlight.ModelCard(…)")
        or ModelCard(),
        "rollout": _rollout(values),
        "log": _log(values),
        "features": _features(values.get("features")),
        "guard": _one("guard", values.get("guard"), GuardSpec, "pilotlight.Guard(…)"),
        "cache": _one(
            "cache", values.get("cache"), ResponseCacheSpec, "pilotlight.ResponseCache(…)"
        ),
        "network": _network(values.get("network", FunctionNetwork.EGRESS)),
        "egress": _several(
            "egress", values.get("egress"), str, "a list of networks or addresses, like 10.1.0.0/16"
        ),
        "cors": _several(
            "cors", values.get("cors"), str, "a list of origins, like https://app.example.com"
        ),
    }


def _log(values: Mapping[str, Any]) -> PredictionLogSpec | None:
    log: PredictionLogSpec | None = _one(
        "log", values.get("log"), PredictionLogSpec, "pilotlight.PredictionLog(…)"
    )
    monitor = _one("monitor", values.get("monitor"), MonitorSpec, "pilotlight.Monitor(…)")
    if monitor is None:
        return log
    if log is None:
        raise InvalidInput(
            "monitor needs log=pilotlight.PredictionLog(…): it watches the logged calls",
            parameter="monitor",
        )
    return replace(log, monitor=monitor)


def _features(value: Any) -> FeaturesSpec | None:
    if value is None:
        return None
    wanted = "pilotlight.FeatureSchema(…), pilotlight.Redis(…) or a list of them"
    given = _several("features", value, FeatureSchema | RedisFeatures, wanted)
    schemas = [one for one in given if isinstance(one, FeatureSchema)]
    return FeaturesSpec(
        arguments=FeatureSchema.merge(*schemas) if schemas else None,
        online=tuple(one for one in given if isinstance(one, RedisFeatures)),
    )


def _network(network: Any) -> FunctionNetwork:
    if network not in list(FunctionNetwork):
        raise InvalidInput(
            f"network = {network!r}: must be one of {', '.join(FunctionNetwork)}",
            parameter="network",
        )
    return FunctionNetwork(network)


def _rollout(values: Mapping[str, Any]) -> RolloutTerms:
    strategy, keep = (
        values.get("rollout_strategy") or RolloutStrategy.SURGE,
        values.get("keep_previous"),
    )
    if strategy not in list(RolloutStrategy):
        raise InvalidInput(
            f"rollout_strategy = {strategy!r}: must be one of {', '.join(RolloutStrategy)}",
            parameter="rollout_strategy",
        )
    if keep is not None:
        require_in_range("keep_previous", keep, 0, 86_400)
    return RolloutTerms(strategy=RolloutStrategy(strategy), keep_previous_s=float(keep or 0))


def _missed(missed: str) -> MissedRunPolicy:
    try:
        return MissedRunPolicy(missed)
    except ValueError as e:
        raise InvalidInput(
            f"missed = {missed!r}: must be one of {', '.join(MissedRunPolicy)}",
            parameter="schedule",
        ) from e


def _one(key: str, value: Any, kind: Any, wanted: str) -> Any:
    if value is not None and not isinstance(value, kind):
        raise InvalidInput(f"{key} = {value!r}: expected {wanted}", parameter=key)
    return value


def _several(key: str, value: Any, kind: Any, wanted: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    values = (value,) if isinstance(value, str) or not isinstance(value, Sequence) else tuple(value)
    return tuple(_one(key, one, kind, wanted) for one in values)


def _require(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(
        isinstance(k, str) and isinstance(v, str) for k, v in value.items()
    ):
        raise InvalidInput(
            f'require = {value!r}: expected a dict such as {{"accuracy": ">= 0.91"}}',
            parameter="require",
        )
    return dict(value)
