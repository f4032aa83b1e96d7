"""Records how the SDK traces custom losses, and what the traced losses compute. Needs torch.

    python graphs.py FIXTURES FOLDER

Traces the functions below for the cases of FIXTURES/semantics/custom_graphs.json, runs them on the
data of the case in float64, and replaces `inputs`, `graph` and `expect`.
"""

import math
import sys
import types

import torch
from tinker.lib.public_interfaces import custom_loss

import common


def neg_ll(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/neg_ll:sum": loss}


def ppo_like(logprobs, old, advantages):
    ratio = torch.exp(logprobs - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/clip_frac:mean": (ratio != clipped).float().mean()}


def detached(logprobs, old, advantages):
    ratio = torch.exp(logprobs - old).clamp(max=4.0).detach()
    return -(ratio * logprobs * advantages).sum(), {}


def masked_mean(logprobs, mask):
    kept = torch.where(mask > 0, logprobs, torch.zeros_like(logprobs))
    return -kept.sum() / mask.sum().clamp(min=1.0), {"custom/n:sum": mask.sum()}


def soft_targets(logprobs, p):
    divergence = (p * (torch.log(p.clamp(min=1e-6)) - logprobs)).sum(dim=-1)
    return divergence.mean(), {"custom/kl_max:mean": divergence.max()}


def scalar_margin(logprobs, beta, ref):
    margin = (logprobs - ref).sum() * beta
    return -torch.nn.functional.logsigmoid(margin), {"custom/margin:mean": margin}


def slices(logprobs, weights):
    products = logprobs[1:] * weights[1:]
    last = logprobs[..., -1]
    return -(products.sum() + 0.5 * last**2) / math.sqrt(2), {"custom/last:mean": last}


def shape_use(logprobs, weights):
    count = logprobs.shape[0]
    return -(logprobs * weights).sum() / count, {}


def softplus_pen(logprobs):
    penalty = torch.nn.functional.softplus(-logprobs, beta=2.0).sum()
    return penalty + torch.cumsum(logprobs, dim=0).pow(2).mean(), {}


def float64(value):
    """Returns a number or a nested list, rounded to float32, as a float64 tensor."""
    return torch.tensor(value, dtype=torch.float32).to(torch.float64)


class Input:
    """Stands in for an input of a datum, which the SDK would give to the loss as float32."""

    def __init__(self, value):
        self.value = value

    def to_torch(self):
        return float64(self.value)


def datum(inputs):
    return types.SimpleNamespace(loss_fn_inputs={name: Input(value) for name, value in inputs.items()})


def record(case):
    ranks = {entry["name"]: entry["rank"] for entry in case["inputs"]}
    handle = custom_loss.trace_loss(globals()[case["name"]], ranks, "session")
    case["inputs"] = [{"name": entry.name, "rank": entry.rank} for entry in handle.inputs]
    case["graph"] = custom_loss.encode_graph(handle).model_dump()
    logprobs = [float64(inputs["logprobs"]).requires_grad_() for inputs in case["data"]]
    loss, metrics = custom_loss.run_loss_handle(handle, [datum(inputs) for inputs in case["data"]], logprobs)
    loss.backward()
    gradients = [one.grad.tolist() for one in logprobs]
    case["expect"] = {"loss_sum": loss.item(), "metrics": metrics, "grad_logprobs": gradients}


def main(fixtures, folder):
    file = common.load(fixtures, "semantics", "custom_graphs.json")
    for case in file["cases"]:
        record(case)
    common.save(folder, "custom_graphs.json", file)
    common.finish(folder, {}, f"{len(file['cases'])} custom losses")


if __name__ == "__main__":
    main(*sys.argv[1:])
