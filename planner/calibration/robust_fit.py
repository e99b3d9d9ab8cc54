"""Fit coefficients to measurements of which a few are far off: Student-t errors, normal priors.

An error e, ln(predicted / measured), has a Student-t distribution with nu degrees of freedom and
scale s; a fitted value x, the logarithm of a coefficient over its prior median, has a normal one
around 0 with standard deviation sigma. The negative log posterior is, up to a constant,

    sum of (nu + 1) / 2 ln(1 + (e / s)^2 / nu)  +  sum of (x / sigma)^2 / 2

`scipy.optimize.least_squares` minimises half the sum of rho(r^2) over residuals r. With residuals
e / s and x / sigma this is the same sum if rho(z) is (nu + 1) ln(1 + z / nu) for errors and z for
priors. The scales are in the residuals, so `f_scale` stays 1. An error's share of the gradient is
then rho'(z) e / s^2, where rho'(z) = (nu + 1) / (nu + z) is its weight against a normal error's.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from scipy.optimize import least_squares
from scipy.sparse import csr_array, diags_array, eye_array, issparse, vstack

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class RobustFit:
    """Values at the posterior's mode, with the errors there and their slopes."""

    x: np.ndarray  # [values]
    errors: np.ndarray  # [errors]
    slopes: np.ndarray | csr_array  # [errors, values]
    error_scale: np.ndarray | float  # [errors]
    prior_sigma: np.ndarray  # [values]
    dof: float

    @cached_property
    def _normal_equations(self) -> tuple[csr_array, np.ndarray, np.ndarray, np.ndarray]:
        """Slopes and errors times the root of the weight, gradient, and inverse Hessian."""
        z = (self.errors / self.error_scale) ** 2
        root = np.sqrt((self.dof + 1) / (self.dof + z)) / self.error_scale
        slopes, errors = csr_array(diags_array(root) @ self.slopes), root * self.errors
        hessian = (slopes.T @ slopes).toarray() + np.diag(self.prior_sigma**-2.0)
        gradient = slopes.T @ errors + self.x / self.prior_sigma**2
        return slopes, errors, gradient, np.linalg.inv(hessian)

    def compute_step_without(self, rows: np.ndarray) -> np.ndarray:
        """Return the Newton step from `x` to the fit without the errors that `rows` selects.

        Without these errors r and their slopes A, both weighted, the gradient g becomes g - A'r and
        the Hessian H becomes H - A'A. By Woodbury's identity its inverse is
        H^-1 + H^-1 A' (1 - A H^-1 A')^-1 A H^-1, which needs H^-1 only once.
        """
        slopes, errors, gradient, inverse = self._normal_equations
        omitted = slopes[rows].toarray()
        half = omitted @ inverse
        step: np.ndarray = inverse @ (omitted.T @ errors[rows] - gradient)
        step += half.T @ np.linalg.solve(np.eye(len(half)) - half @ omitted.T, omitted @ step)
        return step


def remember_last(function: Callable[[np.ndarray], ResultT]) -> Callable[[np.ndarray], ResultT]:
    """Return `function` with its last result kept: optimisers ask twice for the same x."""
    last: list[tuple[np.ndarray, ResultT]] = []

    def remembered(x: np.ndarray) -> ResultT:
        if not last or not np.array_equal(last[0][0], x):
            last[:] = [(x.copy(), function(x))]
        return last[0][1]

    return remembered


def estimate_slopes(
    predict: Callable[[Sequence[np.ndarray]], Iterable[np.ndarray]], x: np.ndarray, step: float
) -> np.ndarray:
    """Return the forward differences of `predict` along the last axis of `x`, [..., values].

    `predict` gives one prediction for each of several x.
    """
    base, *moved = predict([x, *(x + step * unit for unit in np.eye(x.shape[-1]))])
    return np.stack([(prediction - base) / step for prediction in moved], axis=-1)


def fit_student_t(
    compute_errors: Callable[[np.ndarray], np.ndarray],
    compute_slopes: Callable[[np.ndarray], np.ndarray | csr_array],
    error_scale: np.ndarray | float,
    prior_sigma: np.ndarray,
    dof: float,
    *,
    start: np.ndarray | None = None,
    max_evaluations: int | None = None,
    tolerance: float = 1e-3,
) -> RobustFit:
    """Fit values to errors, from 0 or `start`, by a trust-region method.

    Slopes may be dense or sparse, and may be those of a cheaper model. The fit stops when a step
    improves the cost or changes the values by less than the fraction `tolerance`, or after
    `max_evaluations` of the errors, of which the start is the first.
    """
    num_values, compute_slopes = len(prior_sigma), remember_last(compute_slopes)

    def compute_jacobian(scaled: np.ndarray) -> np.ndarray | csr_array:
        slopes = compute_slopes(scaled * prior_sigma)
        weights = np.full(slopes.shape[0], 1 / error_scale)
        scaled_slopes = diags_array(weights) @ slopes @ diags_array(prior_sigma)
        if issparse(slopes):
            return vstack([scaled_slopes, eye_array(num_values)], format="csr")
        return np.concatenate([scaled_slopes, np.eye(num_values)])

    def compute_rho(z: np.ndarray) -> np.ndarray:
        """Return rho, its derivative, and 0 for the second one, [3, residuals].

        The second derivative is left out: it serves the curvature alone, where it would take all
        weight from errors above sqrt(nu) scales, as most are at the start.
        """
        rho = np.stack([z, np.ones_like(z), np.zeros_like(z)])
        z = z[:-num_values]
        rho[:2, :-num_values] = (dof + 1) * np.stack([np.log1p(z / dof), 1 / (dof + z)])
        return rho

    result = least_squares(
        lambda x: np.concatenate([compute_errors(x * prior_sigma) / error_scale, x]),
        np.zeros_like(prior_sigma) if start is None else start / prior_sigma,
        compute_jacobian, loss=compute_rho, ftol=tolerance, xtol=tolerance,
        x_scale=np.sqrt(num_values), max_nfev=max_evaluations,
    )  # fmt: skip
    x, errors = result.x * prior_sigma, result.fun[:-num_values] * error_scale
    return RobustFit(x, errors, compute_slopes(x), error_scale, prior_sigma, dof)
