"""The exact figures equal hand counts, formulas and LiveBytes; the times are times; nothing of the model is touched."""

import copy

import pytest
import torch
from torch import nn

from pipelab.engine.live_bytes import LiveBytes
from pipelab.errors import PartitionError, SizeError
from pipelab.models import cnn, gpt, mlp
from pipelab.partition import partition_layers
from pipelab.profiling import LayerProfile, Profile, profile_layers

MODELS = {
    "mlp": (mlp(), torch.rand(8, 64)),
    "cnn": (cnn(), torch.rand(8, 1, 8, 8)),
    "gpt": (gpt(50, width=32, depth=2, heads=4, context=16), torch.arange(48).view(3, 16)),
}


def column(profile, field):
    return [getattr(layer, field) for layer in profile]


def test_profiling_counts_an_mlp_as_by_hand():
    profile = profile_layers(mlp((64, 96, 10)), torch.rand(8, 64), repeat=1)
    assert column(profile, "name") == ["Linear", "ReLU", "Linear"]
    assert column(profile, "parameters") == [64 * 96 + 96, 0, 96 * 10 + 10]
    assert column(profile, "parameter_bytes") == [4 * count for count in column(profile, "parameters")]
    assert column(profile, "output_bytes") == [4 * 8 * 96, 4 * 8 * 96, 4 * 8 * 10]
    # The first Linear keeps its input, the ReLU its output, which is the input that the second Linear keeps.
    assert column(profile, "saved_bytes") == [4 * 8 * 64, 4 * 8 * 96, 0]
    assert column(profile, "forward_flops") == [2 * 8 * 64 * 96, 0, 2 * 8 * 96 * 10]


@pytest.mark.parametrize("name", MODELS)
def test_profiling_saved_bytes_are_what_stays_alive_after_a_forward(name):
    model, example = MODELS[name]
    model = copy.deepcopy(model)
    with LiveBytes() as memory:
        graph = model(example).grad_fn  # the graph alone, with what autograd keeps; the output itself may go
        alive = memory.live
    assert graph is not None
    there_before = example.nbytes  # kept by the first layer, but not made by the forward
    assert sum(column(profile_layers(model, example, repeat=1), "saved_bytes")) == alive + there_before


def test_profiling_counts_the_flops_of_a_transformer_block():
    width, tokens = 32, 16
    profile = profile_layers(*MODELS["gpt"], repeat=1)
    per_token = 24 * width**2 + 4 * tokens * width  # projections and MLP; scores and their use, masked half included
    assert column(profile, "forward_flops") == [0, *[3 * tokens * per_token] * 2, 3 * tokens * 2 * width * 50]


def test_profiling_counts_a_shared_weight_in_its_first_layer():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    assert column(profile_layers(model, torch.rand(2, 8), repeat=1), "parameters") == [64, 0, 0]


@pytest.mark.parametrize("name", MODELS)
def test_profiling_leaves_the_model_and_torch_as_they_were(name):
    model, example = copy.deepcopy(MODELS[name][0]), MODELS[name][1]
    model(example).sum().backward()
    model.eval()
    model[0].train()
    state, gradients = copy.deepcopy(model.state_dict()), [weight.grad.clone() for weight in model.parameters()]
    modes, random, given = [layer.training for layer in model], torch.get_rng_state(), example.clone()

    profile_layers(model, example, repeat=2)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(w.grad, before) for w, before in zip(model.parameters(), gradients, strict=True))
    assert [layer.training for layer in model] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(example, given)


def test_profiling_draws_no_random_number_of_yours_for_dropout():
    model, example = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.rand(2, 4)
    random = torch.get_rng_state()
    profile_layers(model, example)
    assert torch.equal(torch.get_rng_state(), random)


def test_profiling_takes_a_layer_that_works_in_place():
    example = torch.linspace(-1, 1, 16).view(2, 8)
    given = example.clone()
    rows = {}
    for inplace in (False, True):
        model = nn.Sequential(nn.ReLU(inplace), nn.Linear(8, 8), nn.ReLU(inplace), nn.Linear(8, 2))
        rows[inplace] = profile_layers(model, example, repeat=1)
    assert torch.equal(example, given)
    assert column(rows[True], "saved_bytes") == column(rows[False], "saved_bytes") == [0, 64, 64, 0]


class Split(nn.Module):
    def forward(self, value):
        return {"kept": value, "squared": value * value, "name": "pair"}


class Join(nn.Module):
    def forward(self, value):
        assert value["name"] == "pair"
        return value["kept"] + value["squared"].relu()


def test_profiling_passes_nested_values_from_layer_to_layer():
    profile = profile_layers(nn.Sequential(Split(), Join()), torch.rand(4, 4), repeat=1)
    assert column(profile, "output_bytes") == [128, 64]


class Spy(nn.Module):
    seen: list  # on the class, because layers are profiled as copies

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, value):
        Spy.seen.append((value.requires_grad, self.training, torch.get_num_threads(), torch.is_grad_enabled()))
        return value * self.weight


def test_profiling_runs_as_training_does_on_one_thread_and_asks_no_gradient_of_the_data():
    Spy.seen = []
    with torch.no_grad():
        profile_layers(nn.Sequential(Spy(), Spy()).eval(), torch.rand(2), repeat=3)
    runs = 1 + 1 + 1 + 3  # saved bytes, FLOPs, one dropped, three timed
    assert Spy.seen == [(False, True, 1, True)] * runs + [(True, True, 1, True)] * runs


def test_profiling_times_are_times_and_follow_the_work():
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2))
    profile = profile_layers(model, torch.rand(128, 512))
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in profile)
    assert profile[0].seconds == profile[0].forward_s + profile[0].backward_s
    assert profile[0].seconds > 4 * profile[2].seconds  # 256 times the FLOPs; about 50 times the time on a quiet core


def test_profiling_gives_no_backward_to_a_layer_that_has_nothing_to_learn():
    profile = profile_layers(nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), torch.rand(2, 4), repeat=1)
    assert profile[0].backward_s == 0 < profile[1].backward_s


def test_profiling_feeds_the_partition():
    profile = profile_layers(*MODELS["mlp"], repeat=1)
    assert partition_layers(column(profile, "parameters"), 4).sizes == (2, 2, 2, 1)
    assert sum(partition_layers(column(profile, "seconds"), 4).sizes) == 7


ROWS = Profile(
    [
        LayerProfile("Linear", 6240, 24960, 3072, 2048, 98304, 0.001, 0.0025),
        LayerProfile("<ReLU>", 0, 0, 3072, 3072, 0, 0.0, 0.0005),
    ]
)


def test_profiling_prints_a_table_with_sums():
    assert str(ROWS) == (
        "   layer   parameters  output KiB  saved KiB  forward MFLOP  forward ms  backward ms\n"
        "0  Linear       6,240        3.00       2.00           0.10        1.00         2.50\n"
        "1  <ReLU>           0        3.00       3.00           0.00        0.00         0.50\n"
        "   all          6,240                   5.00           0.10        1.00         3.00"
    )


def test_profiling_shows_a_table_in_a_notebook():
    html = ROWS._repr_html_()
    assert html.count("<tr>") == 4
    assert "<td>0</td><td>Linear</td><td>6,240</td>" in html
    assert "<td>&lt;ReLU&gt;</td>" in html


@pytest.mark.parametrize(
    ("model", "repeat", "error", "message"),
    [
        (nn.Linear(4, 4), 5, PartitionError, "only an nn.Sequential .* and Linear is none"),
        (nn.Sequential(), 5, PartitionError, "the nn.Sequential is empty"),
        (nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 4)), 5, PartitionError, r"layer 1 \(Linear\) .* float32 \(2, 3\)"),
        (nn.Sequential(nn.Linear(4, 4)), 0, SizeError, "repeat must be at least 1"),
    ],
)
def test_profiling_refuses_what_it_cannot_measure(model, repeat, error, message):
    with pytest.raises(error, match=message):
        profile_layers(model, torch.rand(2, 4), repeat)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_profiling_puts_the_threads_back(two_threads):
    profile_layers(*MODELS["mlp"], repeat=1)
    assert torch.get_num_threads() == 2


def test_profiling_puts_threads_and_random_numbers_back_after_an_error(two_threads):
    model, example = nn.Sequential(nn.Dropout(), nn.Linear(4, 3), nn.Linear(4, 4)), torch.rand(2, 4)
    random = torch.get_rng_state()
    with pytest.raises(PartitionError, match="cannot take"):
        profile_layers(model, example)
    assert torch.get_num_threads() == 2
    assert torch.equal(torch.get_rng_state(), random)
