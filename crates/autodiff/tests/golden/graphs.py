"""Records values and gradients of traced losses, as torch computes them.

    pip install torch
    python graphs.py        # writes graphs.json beside this file
"""

import json
import math
import os

import torch

# Every operation that a custom loss may use. x has the shape (T,) or (T, K) and a gradient; w is a float
# tensor of the same shape, m an integer tensor of the same shape with values 0 to 2, i a vector of indices.
# kinks.py covers kinks and ties one by one.
F = torch.nn.functional
GRAPHS = [
    lambda x, w, m, i: (torch.exp(x) + torch.log(w) - torch.log1p(w) * torch.expm1(x)).sum(),
    lambda x, w, m, i: (torch.sqrt(x * x + 1) * torch.rsqrt(w) + x.square() / w + x.reciprocal()).mean(),
    lambda x, w, m, i: (x.abs() + x.sign() * x - torch.neg(x) + x.sigmoid() * x.tanh()).sum(),
    lambda x, w, m, i: (F.relu(x + 1) + F.softplus(x, beta=3.0) + F.logsigmoid(x)).sum(),
    lambda x, w, m, i: x.clamp(-1.5, -0.6).sum() + torch.clip(x, max=-1.0).sum() + x.clamp(min=w - 2).sum(),
    lambda x, w, m, i: torch.minimum(x, -w).sum() + torch.maximum(x, -w).mean() + torch.max(x, w * 0 - 1).sum(),
    lambda x, w, m, i: torch.min(x) * 3 + x.max() + torch.minimum(x, x.detach()).sum(),
    lambda x, w, m, i: (x**2 + 2.0**x + w**x + x.pow(3) + torch.pow(w, 2)).sum(),
    lambda x, w, m, i: (x / w - w / x + x.detach() // 1 + x % 0.7 + torch.div(x, w, rounding_mode="floor")).sum(),
    lambda x, w, m, i: torch.where(m > 0, x * 2, w).sum() + x.masked_fill(m == 0, -9.0).sum(),
    lambda x, w, m, i: torch.where(x > -1, x, torch.zeros_like(x)).sum() + x.where(m.bool(), -x).sum(),
    lambda x, w, m, i: (torch.nan_to_num((x / m).detach(), nan=2.0, posinf=1.0, neginf=-1.0) * x).sum(),
    lambda x, w, m, i: (torch.isnan(x) | torch.isinf(w) | torch.isfinite(x)).float().sum() * x.sum(),
    lambda x, w, m, i: torch.logaddexp(x, w).sum() + x.add(w, alpha=2).sum() + torch.sub(x, w, alpha=3).mean(),
    lambda x, w, m, i: x.sum(0).sum() + x.mean(dim=-1).sum() + x.sum(dim=-1, keepdim=True).pow(2).sum(),
    lambda x, w, m, i: x.amax(-1).sum() + x.amin(dim=0).sum() + x.max(-1)[0].sum() + torch.min(x, dim=0).values.sum(),
    lambda x, w, m, i: x.prod() + x.prod(-1).sum() + (x * m).prod(-1).sum(),
    lambda x, w, m, i: x.var() + x.std() + x.var(-1, unbiased=False).sum() + x.std(dim=0, correction=0).sum(),
    lambda x, w, m, i: x.logsumexp(-1).sum() + torch.logsumexp(x * 3, dim=0, keepdim=True).sum(),
    lambda x, w, m, i: (F.softmax(x, dim=-1) * w).sum() + (x.log_softmax(0) * w).sum() + torch.softmax(x, 0).max(),
    lambda x, w, m, i: (x.cumsum(0) * w).sum() + torch.cumsum(x, dim=-1).square().mean(),
    lambda x, w, m, i: ((x > -1).any().float() + (x < 0).all(-1).float().sum()) * x.mean(),
    lambda x, w, m, i: x.norm() + torch.norm(x, 1) + x.norm(2, dim=-1).sum() + x.norm(3) + (x * 0).norm(),
    lambda x, w, m, i: F.mse_loss(x, w) + F.l1_loss(x, w, reduction="sum") + F.smooth_l1_loss(x, w, beta=0.5),
    lambda x, w, m, i: F.huber_loss(x, w, delta=1.7) + F.mse_loss(x, w, reduction="none").mean(),
    lambda x, w, m, i: (x.reshape(-1) * w.flatten()).sum() + x.view(x.shape[0], -1).square().sum(),
    lambda x, w, m, i: (x.unsqueeze(0) * w.unsqueeze(-1).squeeze(-1)).sum() + x.unsqueeze(-1).squeeze().sum(),
    lambda x, w, m, i: (x.flip(0) * w).sum() + (x.roll(1, 0) * w).sum() + (torch.roll(x, -2) * w).sum(),
    lambda x, w, m, i: (x[1:] * w[:-1]).sum() + (x[::2] * w[::2]).sum() + x[-1].sum() + x[..., 0].sum() * 2,
    lambda x, w, m, i: (x[None] * w[None, ...]).sum() + x[1:3].square().sum() + x[m > 0].square().sum(),
    lambda x, w, m, i: (torch.stack([x, w * x, w]) * 0.5).square().sum() + (torch.cat((x, w)) ** 3).sum(),
    lambda x, w, m, i: x.index_select(0, i).square().sum() + (x[i] * 3).sum() + torch.stack([x, w], dim=-1).prod(-1).sum(),
    lambda x, w, m, i: (x.detach() * x).sum() + x.clone().contiguous().sum() / x.numel() + x.size(0) + x.dim(),
    lambda x, w, m, i: (x.float().double() * x.long().float()).sum() + x.to(torch.float32).type_as(w).sum() * m.sum(),
    lambda x, w, m, i: (torch.ones_like(x) * x + torch.full_like(x, 0.25) * x * x).sum() * (~(m > 0)).float().sum(),
    lambda x, w, m, i: x.sub(w).mul(2).div(3).neg().add_(1).mul_(w).square().sum(),
    lambda x, w, m, i: (x - x.max()).exp().sum().log(),
    lambda x, w, m, i: (F.gelu(x) * w + F.gelu(3 * w) + F.gelu(x * 9, approximate="tanh")).sum(),
]
GRAPHS_2D = [
    lambda x, w, m, i: (x @ w.T).square().sum() + (x.t() * w.transpose(0, 1)).sum() + torch.matmul(x, w[0]).sum(),
    lambda x, w, m, i: x.gather(1, m).sum() * 2 + (x.gather(0, m) * w).sum() + x.permute(1, 0)[0].square().sum(),
    lambda x, w, m, i: (x.sum(-1, keepdim=True).expand(-1, 3) * w).sum() + (x[:, :1].expand_as(w) * w * w).sum(),
    lambda x, w, m, i: (x[:, -1] * w[:, 0]).sum() + x[1, 2] * 5 + torch.cat([x, w], dim=1).cumsum(1).square().sum(),
    lambda x, w, m, i: (x.flatten(0, 1) * 2).sum() + x.flip([0, 1])[0, 0] + x.roll((1, 1), (0, 1))[0].square().sum(),
]


def encode(value):
    """Converts an argument of a traced node to the JSON format of the API."""
    if isinstance(value, torch.fx.Node):
        return {"ref": value.name}
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, slice):
        return {"slice": [encode(value.start), encode(value.stop), encode(value.step)]}
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def target(node):
    """Returns the name of a node's operation, as the tracer of the SDK prints it."""
    if isinstance(node.target, str):
        return node.target
    if node.target is getattr:
        return "getattr"
    module = node.target.__module__ or "torch"
    module = {"_operator": "operator", "builtins": "torch", "torch._VF": "torch"}.get(module, module)
    return f"{module}.{node.target.__name__}"


def trace(function, logprobs="logprobs"):
    """Traces a function and returns its nodes in the JSON format of the API.

    The parameter named by `logprobs` is renamed to `logprobs`.
    """
    nodes = []
    for node in torch.fx.symbolic_trace(function).graph.nodes:
        args = [encode(arg) for arg in node.args]
        if node.op == "output":
            args = [{"tuple": [args[0], {"dict": {"custom/x:sum": args[0]}}]}]
        first = node.name == logprobs
        nodes.append(
            dict(
                op=node.op,
                name="logprobs" if first else node.name,
                target="logprobs" if first else target(node),
                args=args,
                kwargs={key: encode(value) for key, value in node.kwargs.items()},
            )
        )
    return json.loads(json.dumps(nodes).replace(json.dumps({"ref": logprobs}), json.dumps({"ref": "logprobs"})))


def graphs(path):
    """Writes values and gradients of all functions, computed in float64 from float32 inputs."""
    torch.manual_seed(7)
    cases = []
    for number, function in enumerate(GRAPHS + GRAPHS_2D):
        for rank in (1, 2) if number < len(GRAPHS) else (2,):
            shape = (5,) if rank == 1 else (4, 3)
            x = (-2 * torch.rand(shape)).to(torch.float32)
            # Ties, and a value on a bound.
            x.view(-1)[1] = x.view(-1)[0]
            x.view(-1)[2] = -0.5
            w = torch.rand(shape) + 0.5
            m = torch.randint(0, 3, shape)
            i = torch.tensor([2, 0, 2])
            nodes = trace(function, "x")
            leaf = x.double().requires_grad_(True)
            # In-place operations are not allowed on a leaf.
            value = function(leaf * 1, w.double(), m, i)
            (grad,) = torch.autograd.grad(value, leaf)
            assert value.isfinite() and grad.isfinite().all(), f"graph {number}"
            cases.append(
                dict(
                    nodes=nodes,
                    logprobs=x.tolist(),
                    w=w.tolist(),
                    m=m.tolist(),
                    i=i.tolist(),
                    loss=value.item(),
                    grad=grad.tolist(),
                )
            )
    with open(path, "w") as file:
        json.dump(cases, file, allow_nan=False)
        file.write("\n")


if __name__ == "__main__":
    graphs(os.path.join(os.path.dirname(os.path.abspath(__file__)), "graphs.json"))
