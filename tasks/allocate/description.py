"""Adds to a plan what a reader asks of it: prices, windows, shares of a step, parts of the cost."""

from __future__ import annotations

from trainwright.tasks.runs.artefacts import Plan, PlannedDevice, Prediction, StepShares
from trainwright.tasks.spec.pool import Pool


def described(plan: Plan, pool: Pool) -> Plan:
    """The plan, with these fields filled from its prediction and its pool."""
    predicted = plan.predicted
    if predicted is None:
        return plan
    windows = {host.name: host.available for host in pool.hosts}
    step_s = predicted.step_time_s.median
    slowest_s = max(device.step_time_s.median for device in plan.devices)
    devices = [
        device.model_copy(
            update={
                "step_shares": _shares(device.step_time_s.median, slowest_s, step_s),
                "price_per_hour": _price(pool, device.type),
                "available": windows[device.host],
            }
        )
        for device in plan.devices
    ]
    return plan.model_copy(
        update={
            "devices": devices,
            "predicted": _with_parts(predicted, devices, pool),
            "currency": pool.currency,
        }
    )


def _shares(own_s: float, slowest_s: float, step_s: float) -> StepShares:
    return StepShares(
        compute=own_s / step_s,
        wait=(slowest_s - own_s) / step_s,
        communicate=max(0.0, step_s - slowest_s) / step_s,
    )


def _price(pool: Pool, device_type: str) -> float | None:
    """Per hour. In a pool that prices only energy, devices are free."""
    rented = any(name != "energy" for name in pool.prices)
    return pool.prices.get(device_type) if rented or not pool.prices else 0.0


def _with_parts(predicted: Prediction, devices: list[PlannedDevice], pool: Pool) -> Prediction:
    """rent = Σ_r price_r · duration, and energy's cost = price of energy · energy."""
    if predicted.cost is None:
        return predicted
    per_hour = sum(device.price_per_hour or 0.0 for device in devices)
    energy, per_kwh = predicted.energy_j, pool.prices.get("energy")
    return predicted.model_copy(
        update={
            "rent": predicted.duration_s * (per_hour / 3600),
            "energy_cost": energy * (per_kwh / 3.6e6) if energy and per_kwh else None,
        }
    )
