"""Records every operation at its kinks, ties and extremes, as torch computes it.

    pip install torch
    python kinks.py         # writes kinks.json beside this file
    python kinks.py check   # compares kinks.json with the installed torch

A case is a function of the point x, which the loss computes as logprobs - base + at, and of the constant y. On
a server base holds the model's own log-probabilities, so that x is exactly `at`, whatever the model.
The loss is the sum of the function's elements. Values and gradients are computed in float64.

In kinks.json, `loss` and `gradient` are what this project computes. Where torch computes another gradient,
`torch_gradient` holds it, and `difference` names the reason:

    zero_times_infinity   In the chain rule 0 * inf is 0 here, and NaN in torch. A term that is masked out has no
                          gradient, even where its own slope is infinite.
    clamp_bound           The slope of clamp on a bound is 1 here and in older versions of torch; in torch 2.15
                          it is 0, or 1/2 if the bound is a tensor. The built-in losses ppo, cispo and gspo use 1.
"""

import json
import math
import os
import sys

import torch
from graphs import trace

F = torch.nn.functional
HERE = os.path.dirname(os.path.abspath(__file__))

# Name, function, x, y, and the reason and gradient where ours differs from torch's.
CASES = [
    ("maximum", lambda x, y: torch.maximum(x, y), [-1, 0, 2], [0, 0, 0]),
    ("minimum", lambda x, y: torch.minimum(x, y), [-1, 0, 2], [0, 0, 0]),
    ("max_of_two", lambda x, y: torch.max(x, y), [-1, 0, 2], [0, 0, 0]),
    ("min_of_two", lambda x, y: torch.min(x, y), [-1, 0, 2], [0, 0, 0]),
    ("maximum_with_itself", lambda x, y: torch.maximum(x, x), [-1, 0, 2], [0, 0, 0]),
    ("maximum_with_number", lambda x, y: torch.maximum(x, torch.full_like(x, 0.5, dtype=torch.float32)), [0, 0.5, 1], [0, 0, 0]),
    ("minimum_with_number", lambda x, y: torch.minimum(x, torch.full_like(x, 0.5, dtype=torch.float32)), [0, 0.5, 1], [0, 0, 0]),
    ("max_of_all", lambda x, y: x.max(), [1, 3, 3], [0, 0, 0]),
    ("min_of_all", lambda x, y: x.min(), [1, 1, 3], [0, 0, 0]),
    ("max_along_dimension", lambda x, y: x.max(0)[0], [1, 3, 3], [0, 0, 0]),
    ("min_along_dimension", lambda x, y: torch.min(x, dim=0).values, [1, 1, 3], [0, 0, 0]),
    ("amax", lambda x, y: x.amax(-1), [1, 3, 3], [0, 0, 0]),
    ("amin", lambda x, y: x.amin(dim=0), [1, 1, 3], [0, 0, 0]),
    ("clamp", lambda x, y: x.clamp(-1, 1), [-2, -1, 0, 1, 2], [0] * 5, "clamp_bound", [0, 1, 1, 1, 0]),
    ("clamp_min", lambda x, y: torch.clamp(x, min=0.0), [-1, 0, 1], [0, 0, 0], "clamp_bound", [0, 1, 1]),
    ("clamp_max", lambda x, y: torch.clamp(x, max=0.0), [-1, 0, 1], [0, 0, 0], "clamp_bound", [1, 1, 0]),
    ("clamp_by_tensor", lambda x, y: torch.clamp(x, min=y), [-1, 0, 1], [0, 0, 0], "clamp_bound", [0, 1, 1]),
    ("clip", lambda x, y: torch.clip(x, 0.0, 1.0), [-1, 0, 1, 2], [0] * 4, "clamp_bound", [0, 1, 1, 0]),
    ("relu", lambda x, y: F.relu(x), [-1, 0, 1], [0, 0, 0]),
    ("abs", lambda x, y: x.abs(), [-2, 0, 3], [0, 0, 0]),
    ("sign", lambda x, y: x.sign() * x, [-2, 0, 3], [0, 0, 0]),
    ("sqrt_at_zero", lambda x, y: x.sqrt(), [0, 4], [0, 0]),
    ("sqrt_of_square_at_zero", lambda x, y: (x * x).sqrt(), [-2, 0], [0, 0], "zero_times_infinity", [-1, 0]),
    ("sqrt_times_zero", lambda x, y: x.sqrt() * y, [0, 4], [0, 1], "zero_times_infinity", [0, 0.25]),
    ("rsqrt_at_zero", lambda x, y: x.rsqrt(), [0, 4], [0, 0]),
    ("reciprocal_at_zero", lambda x, y: x.reciprocal(), [0, 4], [0, 0]),
    ("division_by_zero", lambda x, y: x / y, [1, 4], [0, 2]),
    ("log_at_zero", lambda x, y: x.log(), [0, 2], [0, 0]),
    ("log1p_at_minus_one", lambda x, y: torch.log1p(x), [-1, 1], [0, 0]),
    ("where", lambda x, y: torch.where(x > y, x * 3, x * 2), [-1, 0, 1], [0, 0, 0]),
    ("where_masks_log", lambda x, y: torch.where(x > 0, x.log(), torch.zeros_like(x)), [0, 2], [0, 0], "zero_times_infinity", [0, 0.5]),
    ("where_masks_sqrt", lambda x, y: torch.where(x > 0, x.sqrt(), x), [0, 4], [0, 0], "zero_times_infinity", [1, 0.25]),
    ("where_of_clean_input", lambda x, y: torch.where(x > 0, torch.where(x > 0, x, torch.ones_like(x)).log(), torch.zeros_like(x)), [0, 2], [0, 0]),
    ("masked_fill_of_log", lambda x, y: x.log().masked_fill(x == 0, 0.0), [0, 2], [0, 0], "zero_times_infinity", [0, 0.5]),
    ("pow_zero", lambda x, y: x**0, [-1, 0, 1], [0, 0, 0]),
    ("pow_half_at_zero", lambda x, y: x**0.5, [0, 4], [0, 0]),
    ("pow_one", lambda x, y: x**1, [-1, 0, 1], [0, 0, 0]),
    ("pow_two", lambda x, y: x**2, [-1, 0, 1], [0, 0, 0]),
    ("pow_three", lambda x, y: x.pow(3), [-2, 0, 1], [0, 0, 0]),
    ("pow_minus_one_at_zero", lambda x, y: x**-1, [0, 2], [0, 0]),
    ("zero_to_the_power", lambda x, y: 0.0**x, [0, 0.5, 2], [0, 0, 0]),
    ("tensor_to_the_power", lambda x, y: x**y, [0, 0, 1, 2], [0, 1, 0, 2]),
    ("exp_extremes", lambda x, y: x.exp(), [-1000, -40, 0], [0, 0, 0]),
    ("expm1_extremes", lambda x, y: torch.expm1(x), [-1000, -1e-20, 1], [0, 0, 0]),
    ("sigmoid_extremes", lambda x, y: x.sigmoid(), [-1000, -40, 0, 40, 1000], [0] * 5),
    ("logsigmoid_extremes", lambda x, y: F.logsigmoid(x), [-1000, -40, 0, 40, 1000], [0] * 5),
    ("softplus_extremes", lambda x, y: F.softplus(x), [-1000, -40, 0, 20, 20.5, 1000], [0] * 6),
    ("tanh_extremes", lambda x, y: x.tanh(), [-1000, -20, 0, 20, 1000], [0] * 5),
    ("gelu_extremes", lambda x, y: F.gelu(x), [-1000, -10, 0, 10, 1000], [0] * 5),
    ("logaddexp_ties_and_extremes", lambda x, y: torch.logaddexp(x, y), [-1000, 0, 1, 1000], [1000, 0, 1, -1000]),
    ("logsumexp_ties", lambda x, y: x.logsumexp(-1), [2, 2, -1000], [0, 0, 0]),
    ("logsumexp_extremes", lambda x, y: x.logsumexp(-1), [1000, -1000, 999], [0, 0, 0]),
    ("softmax_extremes", lambda x, y: F.softmax(x, dim=-1) * y, [1000, 0, -1000], [1, 2, 3]),
    ("log_softmax_extremes", lambda x, y: F.log_softmax(x, dim=-1) * y, [100, 0, -100], [1, 2, 3]),
    ("norm_of_zero", lambda x, y: x.norm(), [0, 0], [0, 0]),
    ("norm_one", lambda x, y: torch.norm(x, 1), [-1, 0, 2], [0, 0, 0]),
    ("norm_infinity_ties", lambda x, y: torch.norm(x, float("inf")), [1, -1, 0], [0, 0, 0]),
    ("std_of_equal", lambda x, y: x.std(), [1, 1, 1], [0, 0, 0]),
    ("prod_with_a_zero", lambda x, y: x.prod(), [2, 0, 3], [0, 0, 0]),
    ("prod_with_two_zeros", lambda x, y: x.prod(), [2, 0, 0], [0, 0, 0]),
    ("l1_loss", lambda x, y: F.l1_loss(x, y, reduction="sum"), [-1, 0, 1], [0, 0, 0]),
    ("smooth_l1_loss", lambda x, y: F.smooth_l1_loss(x, y, reduction="sum"), [-1, 0, 1, 2], [0] * 4),
    ("huber_loss", lambda x, y: F.huber_loss(x, y, reduction="sum"), [-1, 0, 1, 2], [0] * 4),
    ("remainder", lambda x, y: x % 1.0, [-0.5, 0, 1, 1.5], [0] * 4),
    ("nan_to_num", lambda x, y: torch.nan_to_num(x, nan=1.0, posinf=2.0, neginf=-2.0), [0, 1], [0, 0]),
]


def evaluate(function, at, y):
    """Returns the loss and the gradient that torch computes."""
    logprobs = torch.zeros(len(at), dtype=torch.float64, requires_grad=True)
    point = logprobs + torch.tensor(at, dtype=torch.float32).double()
    loss = function(point, torch.tensor(y, dtype=torch.float32).double()).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient.tolist()


def encode(number):
    """Returns the number, or the string "nan", "inf" or "-inf", which JSON cannot express as numbers."""
    if math.isnan(number):
        return "nan"
    return number if math.isfinite(number) else ("inf" if number > 0 else "-inf")


def same(found, expected):
    """Compares a list of torch's numbers with encoded ones."""
    close = lambda a, b: math.isclose(a, float(b), rel_tol=1e-9, abs_tol=1e-12) or (math.isnan(a) and b == "nan")
    return len(found) == len(expected) and all(close(a, b) for a, b in zip(found, expected))


def record(name, function, at, y, difference=None, gradient=None):
    def loss(logprobs, base, at, y):
        return function(logprobs - base + at, y).sum()

    value, torch_gradient = evaluate(function, at, y)
    case = dict(name=name, at=[float(a) for a in at], y=[float(b) for b in y], loss=encode(value))
    torch_gradient = [encode(slope) for slope in torch_gradient]
    if difference is None:
        case["gradient"] = torch_gradient
    else:
        case.update(gradient=[float(slope) for slope in gradient], torch_gradient=torch_gradient, difference=difference)
    case["graph"] = dict(format=1, nodes=trace(loss))
    return case


def check(path):
    """Returns the cases of the file that the installed torch computes differently."""
    with open(path) as file:
        recorded = {case["name"]: case for case in json.load(file)["cases"]}
    wrong = sorted(set(recorded) ^ {case[0] for case in CASES})
    for name, function, at, y, *_ in CASES:
        case = recorded.get(name)
        if case is None:
            continue
        loss, gradient = evaluate(function, at, y)
        accepted = [case.get("torch_gradient", case["gradient"])]
        if case.get("difference") == "clamp_bound":
            accepted.append(case["gradient"])
        if not (same([loss], [case["loss"]]) and any(same(gradient, one) for one in accepted)):
            wrong.append(f"{name}: loss {loss}, gradient {gradient}, recorded {case['loss']}, {accepted}")
    return wrong


def main():
    path = os.path.join(HERE, "kinks.json")
    if sys.argv[1:] == ["check"]:
        wrong = check(path)
        sys.exit("\n".join(wrong) if wrong else 0)
    cases = [record(*case) for case in CASES]
    lines = ",\n".join(json.dumps(case, allow_nan=False) for case in cases)
    with open(path, "w") as file:
        file.write(f'{{"torch": "{torch.__version__.split("+")[0]}", "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
