"""Updates on the way: the engine against a replay in one process, and that against the papers' formulas by hand."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from plain_training import largest_difference
from torch import nn
from torch.nn import functional as F

import pipelab as pl
from pipelab import models
from pipelab.replay import replay

pytestmark = pytest.mark.timeout(60)
RATE = 0.1


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def fast(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def plain(parameters):
    return torch.optim.SGD(parameters, lr=RATE)


def batch(samples, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 5, generator=random), torch.randint(3, (samples,), generator=random)


def network(seed=0):
    torch.manual_seed(seed)
    first = [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh()]
    return nn.Sequential(*first, nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))


def perceptron(*widths):
    torch.manual_seed(3)
    return models.mlp(widths)


RUNS = {
    "stashing": (pl.pipedream, "stashing"),
    "vertical sync": (pl.pipedream, "vertical_sync"),
    "no stashing": (pl.pipedream, "latest"),
    "2BW": (lambda p, m: pl.pipedream_2bw(p, 2 * m, m), "two_buffered"),
    "stashing, in groups": (lambda p, m: pl.pipedream_2bw(p, 2 * m, m), "stashing"),
}


# --- the engine is the replay -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "optimizer"), [(2, momentum), (3, adam), (4, momentum)])
@pytest.mark.parametrize("run", RUNS)
def test_asynchronous_engine_equals_the_replay(ranks_of, run, p, optimizer):
    build, rule = RUNS[run]
    schedule = build(p, 6)
    batches = [batch(samples, seed) for seed, samples in enumerate((27, 24, 31))]  # uneven, and of different sizes
    pipe = pl.Pipeline(
        network(), schedule, loss_fn=F.cross_entropy, optimizer=optimizer, ranks=ranks_of(p), weights=rule
    )
    steps = [pipe.step(*each) for each in batches]
    alone = network()
    losses = replay(alone, schedule, batches, loss_fn=F.cross_entropy, optimizer=optimizer, rule=rule)
    assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-5)
    assert largest_difference(pipe.state_dict(), alone.state_dict()) < 1e-4
    for step in steps:  # what the ranks counted is what the rule says
        assert step.versions == pl.weight_versions(schedule, rule)
        assert step.held_versions == pl.stashed_versions(schedule, rule)


def test_asynchronous_rules_differ():
    ends = {}
    for run, (build, rule) in RUNS.items():
        ends[run] = network()
        replay(ends[run], build(3, 6), [batch(36)] * 2, loss_fn=F.cross_entropy, optimizer=fast, rule=rule)
    for one, other in itertools.combinations(ends, 2):
        assert largest_difference(ends[one].state_dict(), ends[other].state_dict()) > 1e-3, (one, other)


@pytest.mark.parametrize("rule", ["stashing", "vertical_sync"])
@pytest.mark.parametrize("remat", ["stage", "layer"])
def test_asynchronous_recomputes_with_the_weights_of_the_forward(ranks_of, rule, remat):
    schedule, setting = pl.pipedream(2, 6), {"loss_fn": F.cross_entropy, "optimizer": momentum, "ranks": ranks_of(2)}
    kept, again = (
        pl.Pipeline(perceptron(5, 8, 8, 3), schedule, weights=rule, remat=choice, **setting)
        for choice in ("none", remat)
    )
    assert kept.step(*batch(24)).versions == again.step(*batch(24)).versions
    assert largest_difference(kept.state_dict(), again.state_dict()) < 1e-6


@pytest.mark.parametrize("rule", ["stashing", "latest"])
def test_asynchronous_split_backwards_use_the_same_versions(ranks_of, rule):
    # the same order with every B cut into I and W, one after the other: every gradient is the same
    whole = pl.pipedream(2, 6)
    split = pl.Schedule.from_text("\n".join(map(halves, whole.to_text().splitlines()[1:])))
    setting = {"loss_fn": F.cross_entropy, "optimizer": momentum, "ranks": ranks_of(2), "weights": rule}
    one, other = (pl.Pipeline(perceptron(5, 8, 8, 8, 3), schedule, **setting) for schedule in (whole, split))
    one.step(*batch(24))
    other.step(*batch(24))
    assert largest_difference(one.state_dict(), other.state_dict()) < 1e-5


def halves(row):
    return " ".join(f"{w.replace('B', 'I')} {w.replace('B', 'W')}" if "B" in w else w for w in row.split())


def test_asynchronous_evaluates_and_goes_on_from_a_checkpoint(ranks_of, tmp_path):
    schedule, setting = pl.pipedream(2, 4), {"loss_fn": F.cross_entropy, "optimizer": adam, "ranks": ranks_of(2)}
    pipe = pl.Pipeline(network(), schedule, **setting)
    pipe.step(*batch(16))
    pipe.save(tmp_path / "half.pt")
    again = pl.Pipeline.load(tmp_path / "half.pt", network(seed=1), schedule, **setting)
    assert again.evaluate(*batch(8, 1)) == pipe.evaluate(*batch(8, 1))
    assert again.step(*batch(16, 2)).loss == pipe.step(*batch(16, 2)).loss
    assert largest_difference(again.state_dict(), pipe.state_dict()) == 0


def test_asynchronous_trace_shows_updates_and_their_time(ranks_of):
    pace = pl.Costs(F=0.01, I=0.01, W=0.01, U=0.02)
    schedule = pl.pipedream(2, 3)
    pipe = pl.Pipeline(network(), schedule, loss_fn=F.cross_entropy, optimizer=plain, ranks=ranks_of(2), pace=pace)
    trace = pipe.step(*batch(12)).trace
    assert tuple(tuple(span.action for span in row) for row in trace.by_rank) == schedule.ranks
    assert [span.version for span in trace.spans if span.action.kind is pl.Kind.U] == [1, 2, 3] * 2
    assert pl.simulate(schedule, pace).makespan - 0.001 <= trace.makespan
    assert min(pl.Costs.from_trace(trace).U) > 0


def test_asynchronous_memory_counts_the_versions(ranks_of):
    # one wide Linear a stage: a version has 1 MB, and beside it the activations of 2 samples are nothing
    model = nn.Sequential(*(nn.Linear(500, 500, bias=False) for _ in range(3)))
    x = torch.randn(12, 500)
    setting = {"loss_fn": F.mse_loss, "optimizer": plain, "ranks": ranks_of(3), "measure_memory": True}
    alive = {}
    for rule in ("latest", "stashing", "vertical_sync"):
        result = pl.Pipeline(model, pl.pipedream(3, 6), weights=rule, **setting).step(x, x)
        alive[rule] = [max(held) / 1e6 for held in result.held_bytes]
    assert alive["latest"] == pytest.approx([0, 0, 0], abs=0.1)
    assert alive["stashing"] == pytest.approx([2, 1, 0], abs=0.1)  # p - r versions, of which one is the parameters
    assert alive["vertical_sync"] == pytest.approx([2, 2, 2], abs=0.1)


# --- the replay is the formula ----------------------------------------------------------------------------------------


def chain(weights):
    """h = w_n ... w_2 w_1 x, one stage a weight, in double precision."""
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in weights))
    for layer, weight in zip(model, weights, strict=True):
        nn.init.constant_(layer.weight, weight)
    return model


def half_square(output, target):
    return 0.5 * (output - target).square().mean()


def gradient(weights, x, y):
    """That of 0.5 (w_n ... w_1 x - y)^2, by hand."""
    error = math.prod(weights) * x - y
    return [error * x * math.prod(w for j, w in enumerate(weights) if j != i) for i in range(len(weights))]


START = (0.9, 1.3, 0.7)
STREAM = [(0.8, 0.3), (-0.5, 1.0), (1.1, 0.2), (0.4, -0.6), (-0.9, 0.5), (0.7, 0.7), (0.6, -0.1), (1.2, 0.9)]


def replayed(schedule, rule):
    model, data = chain(START), torch.tensor(STREAM, dtype=torch.float64)
    replay(model, schedule, [(data[:, :1], data[:, 1:])], loss_fn=half_square, optimizer=plain, rule=rule)
    return [layer.weight.item() for layer in model]


@pytest.mark.parametrize(
    ("rule", "delays"),
    [("stashing", (2, 1, 0)), ("vertical_sync", (2, 2, 2))],  # w_i(t - n + i) for i = 1, 2, 3; all at t - n + 1
)
def test_asynchronous_replay_is_pipedreams_formula(rule, delays):
    w = [list(START)]
    for t, (x, y) in enumerate(STREAM):
        seen = [w[max(t - delay, 0)][i] for i, delay in enumerate(delays)]
        w.append([now - RATE * g for now, g in zip(w[t], gradient(seen, x, y), strict=True)])
    assert replayed(pl.pipedream(3, 8), rule) == pytest.approx(w[-1], rel=1e-12)


def test_asynchronous_replay_is_2bws_formula():
    # W(t+1) = W(t) - lr * grad f(W(t-1)), f the mean over a batch of 4 micro-batches
    w = [list(START)]
    for t in range(2):
        old = w[max(t - 1, 0)]
        found = [gradient(old, x, y) for x, y in STREAM[4 * t : 4 * t + 4]]
        w.append([now - RATE * sum(g) / 4 for now, g in zip(w[t], zip(*found, strict=True), strict=True)])
    assert replayed(pl.pipedream_2bw(3, 8, 4), "two_buffered") == pytest.approx(w[-1], rel=1e-12)


def test_asynchronous_replay_without_stashing_mixes_versions():
    # the error, and what every stage was given, come from the weights of F; the way back goes through those of now
    w, stages = [list(START)], range(3)
    for t, (x, y) in enumerate(STREAM):
        forward = [w[max(t - 2 + i, 0)][i] for i in stages]
        error = math.prod(forward) * x - y
        given = [x * math.prod(forward[:i]) for i in stages]
        back = [error * math.prod(w[t][i + 1 :]) for i in stages]
        w.append([now - RATE * g * h for now, g, h in zip(w[t], back, given, strict=True)])
    assert replayed(pl.pipedream(3, 8), "latest") == pytest.approx(w[-1], rel=1e-12)


def test_asynchronous_replay_of_a_flushed_schedule_is_plain_training():
    model, alone = perceptron(5, 8, 8, 3), perceptron(5, 8, 8, 3)
    replay(model, pl.gpipe(2, 4), [batch(21)] * 3, loss_fn=F.cross_entropy, optimizer=adam)
    optimizer = adam(alone.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(alone(batch(21)[0]), batch(21)[1]))
        optimizer.step()
    assert largest_difference(model.state_dict(), alone.state_dict()) < 1e-4


# --- without stashing, no function has this gradient ------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["stashing", "latest"])
def test_asynchronous_gradient_belongs_to_a_function_only_with_stashing(ranks_of, rule):
    # rank 0 has two layers, so its backward passes a weight. Its last gradient is compared with finite differences of
    # the loss, at every choice of one version a layer among all that there ever were
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 1)).double()
    x, y = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 1, dtype=torch.float64)
    setting = {"loss_fn": F.mse_loss, "optimizer": plain, "ranks": ranks_of(2), "partition": [3, 1], "weights": rule}
    history = [copy.deepcopy(model.state_dict())]
    for updates in (1, 2, 3):  # the weights after each update, by streams that end there
        pipe = pl.Pipeline(model, pl.pipedream(2, updates), **setting)
        pipe.step(x[:updates], y[:updates])
        history.append(pipe.state_dict())
    found = pipe.gradients()["0.weight"]
    fits = [
        torch.allclose(found, finite_difference(model, mixture(history, choice), x[2:], y[2:]), rtol=1e-5, atol=1e-9)
        for choice in itertools.product(range(3), repeat=3)
    ]
    assert any(fits) == (rule == "stashing")


def mixture(history, choice):
    layers = zip(("0.", "2.", "3."), choice, strict=True)
    return {name: value for layer, n in layers for name, value in history[n].items() if name.startswith(layer)}


def finite_difference(model, state, x, y):
    """d loss / d 0.weight at `state`, entry by entry."""
    model, step = copy.deepcopy(model), 1e-6
    model.load_state_dict(state)
    weight = model[0].weight.data
    found = torch.zeros_like(weight)
    with torch.no_grad():
        for place in itertools.product(*map(range, weight.shape)):
            middle, losses = weight[place].item(), []
            for shift in (step, -step):
                weight[place] = middle + shift
                losses.append(F.mse_loss(model(x), y).item())
            weight[place] = middle
            found[place] = (losses[0] - losses[1]) / (2 * step)
    return found


# --- what is refused --------------------------------------------------------------------------------------------------

TIED = nn.Linear(4, 4)
REFUSED = {
    "no optimizer": ({"optimizer": None}, "there is no optimizer to make them: give one"),
    "clipping": ({"max_norm": 1.0}, "max_norm needs the gradients of all ranks"),
    "statistics of a mini-batch": (
        {"batchnorm": "minibatch", "model": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))},
        "batchnorm='minibatch' needs a mini-batch",
    ),
    "tied weights": ({"model": nn.Sequential(TIED, nn.ReLU(), TIED)}, "0.weight and 2.weight are one parameter"),
    "recomputing without stashing": ({"weights": "latest", "remat": "stage"}, "weights='latest' is about saved"),
    "copies without stashing": ({"weights": "latest", "precision": "bf16"}, "bf16 forwards save copies"),
    "an unknown rule": ({"weights": "newest"}, "weights must be 'stashing' or .*got 'newest'"),
    "a rule without updates": ({"schedule": pl.gpipe(2, 2), "weights": "latest"}, "updates once, after all of them"),
    "two stages a rank": (
        {
            "model": nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))),
            "schedule": pl.Schedule.from_text("0F0 2F0 2B0 2U0 0B0 0U0\n1F0 3F0 3B0 3U0 1B0 1U0"),
        },
        "take one stage a rank",
    ),
    "stages that differ": (
        {"schedule": pl.Schedule.from_text("0F0 0F1 0B0 0B1 0U1\n1F0 1B0 1U0 1F1 1B1 1U1")},
        "do not update after the same micro-batches",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_asynchronous_refuses_what_it_would_do_wrong(ranks_of, case):
    changes, sentence = REFUSED[case]
    given = {
        "model": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        "schedule": pl.pipedream(2, 2),
        "loss_fn": F.mse_loss,
        "optimizer": plain,
        "ranks": ranks_of(2),
        **changes,
    }
    with pytest.raises(pl.EngineError, match=sentence):
        pl.Pipeline(given.pop("model"), given.pop("schedule"), **given)


def test_asynchronous_refuses_to_put_an_update_off(ranks_of):
    pipe = pl.Pipeline(network(), pl.pipedream(2, 2), loss_fn=F.cross_entropy, optimizer=plain, ranks=ranks_of(2))
    with pytest.raises(pl.EngineError, match="update=False, but schedule 'pipedream' updates on the way"):
        pipe.step(*batch(8), update=False)
    pipe.step(*batch(8))


def test_asynchronous_refuses_counts_before_any_update(ranks_of):
    def summed(output, target):
        return F.cross_entropy(output, target, reduction="sum"), len(target)

    pipe = pl.Pipeline(network(), pl.pipedream(2, 2), loss_fn=summed, optimizer=plain, ranks=ranks_of(2))
    with pytest.raises(pl.EngineError, match="nobody waits for the counts: return the mean"):
        pipe.step(*batch(8))


def test_asynchronous_ends_at_what_is_not_finite_and_names_the_update(ranks_of):
    x, y = batch(8)
    x[5] = math.inf  # in micro-batch 1
    setting = {"loss_fn": F.cross_entropy, "optimizer": plain, "ranks": ranks_of(2)}
    pipe = pl.Pipeline(perceptron(5, 8, 3), pl.pipedream(2, 2), **setting)
    with pytest.raises(pl.EngineError, match="U1: a gradient is not finite, and this update was not made"):
        pipe.step(x, y)
    with pytest.raises(pl.EngineError, match="this pipeline is over"):
        pipe.step(*batch(8))
    ignoring = pl.Pipeline(perceptron(5, 8, 3), pl.pipedream(2, 2), nan="ignore", **setting)
    assert math.isnan(ignoring.step(x, y).loss)


def test_asynchronous_replay_refuses_what_it_cannot_do():
    given = {"loss_fn": F.cross_entropy, "optimizer": plain}
    with pytest.raises(pl.EngineError, match="splits them into I and W"):
        replay(network(), pl.zb_h1(2, 4), [batch(8)], **given)
    with pytest.raises(pl.SizeError, match="8 inputs came with 4 targets"):  # half_square would spread them over all
        replay(network(), pl.pipedream(2, 4), [(batch(8)[0], torch.zeros(4))], **given)
    for wrong in (lambda made, _: (made.sum(), 2), lambda made, _: made):
        with pytest.raises(pl.EngineError, match=r"returns the mean over its samples, one number, got \(?tensor"):
            replay(network(), pl.pipedream(2, 4), [batch(8)], **{**given, "loss_fn": wrong})
    with pytest.raises(pl.SizeError, match="3 samples cannot fill 4 micro-batches"):
        replay(network(), pl.pipedream(2, 4), [batch(3)], **given)
    with pytest.raises(pl.ScheduleError, match="needs version 1 of its weights"):
        replay(network(), pl.pipedream(3, 4), [batch(8)], rule="two_buffered", **given)
