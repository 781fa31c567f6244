"""The nn modules, and the causal-LM loss as models and trainers use it."""

import copy
import io
import pickle

import loss_core
import pytest
import torch
from loss_core import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode


def test_cross_entropy_module_is_torchs_with_classes_last():
    logits, target = torch.randn(4, 6, dtype=torch.float64, requires_grad=True), torch.tensor([0, 5, -100, 2])
    weight = torch.rand(6, dtype=torch.float64)
    ours = nn.CrossEntropyLoss(weight, label_smoothing=0.1, reduction="sum")(logits, target)
    theirs = torch.nn.CrossEntropyLoss(weight, label_smoothing=0.1, reduction="sum")(logits, target)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    images, labels = torch.randn(2, 6, 3, 3, dtype=torch.float64), torch.randint(6, (2, 3, 3))
    ours = nn.CrossEntropyLoss(weight, dim=1)(images, labels)
    torch.testing.assert_close(ours, torch.nn.CrossEntropyLoss(weight)(images, labels), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("ignore_index", 2),
        ("reduction", "none"),
        ("label_smoothing", 0.3),
        ("z_loss", 0.1),
        ("softcap", 2.0),
        ("logit_scale", 0.5),
    ],
)
def test_modules_pass_every_option_on(option, value):
    logits, target = torch.randn(1, 4, 6), torch.tensor([[0, 2, 5, 1]])
    plain = nn.CrossEntropyLoss()(logits, target)
    module = nn.CrossEntropyLoss(**{option: value})
    got = module(logits, target)
    assert torch.equal(got, loss_core.cross_entropy(logits, target, **{option: value}))
    assert got.shape != plain.shape or got.item() != plain.item()
    assert f"{option}={value!r}" in repr(module)
    module = nn.CausalLMLoss(**{option: value})
    assert torch.equal(module(logits, target), loss_core.causal_lm_loss(logits, target, **{option: value}))
    assert f"{option}={value!r}" in repr(module)


@pytest.mark.parametrize("module", ["CrossEntropyLoss", "CausalLMLoss"])
def test_options_are_attributes_that_can_be_set_later(module):
    """As those of torch's modules; set on one that keeps its options elsewhere, they would silently do nothing."""
    logits, target = torch.randn(1, 4, 6), torch.tensor([[0, 2, 5, 1]])
    options = {"ignore_index": 2, "reduction": "none", "label_smoothing": 0.3, "z_loss": 0.1, "softcap": 2.0,
               "logit_scale": 0.5, "backend": "torch"}  # fmt: skip
    for name, value in options.items():
        late = getattr(nn, module)()
        assert getattr(late, name) == getattr(torch.nn.CrossEntropyLoss(), name, getattr(late, name))
        setattr(late, name, value)
        early = getattr(nn, module)(**{name: value})
        assert repr(late) == repr(early)
        assert torch.equal(late(logits, target), early(logits, target))
        twin = pickle.loads(pickle.dumps(late))
        assert torch.equal(twin(logits, target), early(logits, target))
    images = nn.CrossEntropyLoss()
    images.dim = 1
    assert images(logits, torch.zeros(1, 6, dtype=torch.int64)) > 0


def test_modules_pass_on_what_a_batch_brings():
    logits, target, lengths = torch.randn(1, 4, 6), torch.tensor([[0, 2, 5, 1]]), torch.tensor([[1, 2, 3, 4]])
    assert nn.CrossEntropyLoss()(logits, target, num_items=7) == loss_core.cross_entropy(logits, target, num_items=7)
    got = nn.CrossEntropyLoss(reduction="byte_mean")(logits, target, byte_lengths=lengths)
    assert got == loss_core.cross_entropy(logits, target, reduction="byte_mean", byte_lengths=lengths)
    got = nn.CausalLMLoss()(logits, target, num_items=7, shift_labels=target)
    assert got == loss_core.cross_entropy(logits, target, num_items=7)


@pytest.mark.parametrize("module", [nn.Softmax, nn.LogSoftmax])
def test_softmax_modules(module):
    x = torch.randn(2, 3, 4)
    theirs = getattr(torch.nn, module.__name__)
    for dim in (-1, 0, 1):
        torch.testing.assert_close(module(dim)(x), theirs(dim)(x))
    assert module(dtype=torch.float64)(x).dtype == torch.float64
    assert repr(module(1)) == f"{module.__name__}(dim=1)"


def test_weights_move_and_are_saved_with_the_module():
    module = nn.CrossEntropyLoss(torch.rand(6))
    assert module.double().weight.dtype == torch.float64
    assert list(module.state_dict()) == ["weight"]
    other = nn.CrossEntropyLoss(torch.zeros(6))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.weight, module.weight.float())
    logits, target = torch.randn(2, 6), torch.tensor([1, 2])
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(logits, target), module(logits, target))
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(logits, target), module(logits, target))


# Causal LM


def shifted(logits, labels, **options):
    """What models compute by hand: a copy of the logits without the last, labels without the first position."""
    classes = logits.shape[-1]
    return functional.cross_entropy(logits[..., :-1, :].reshape(-1, classes), labels[..., 1:].reshape(-1), **options)


def test_labels_are_shifted_once():
    labels = torch.tensor([[3, 1, 2, 0, 1]])
    logits = 40.0 * functional.one_hot(labels.roll(-1, 1), 4)
    assert loss_core.causal_lm_loss(logits, labels).item() < 1e-6
    # Neither not at all nor twice.
    assert loss_core.causal_lm_loss(40.0 * functional.one_hot(labels, 4), labels).item() > 5
    assert loss_core.causal_lm_loss(40.0 * functional.one_hot(labels.roll(-2, 1), 4), labels).item() > 5
    assert loss_core.causal_lm_loss(logits, None, shift_labels=labels.roll(-1, 1)).item() < 1e-6


@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 3, 5)])
def test_causal_lm_loss_is_the_shifted_cross_entropy(shape):
    logits, labels = torch.randn(*shape, 7, dtype=torch.float64, requires_grad=True), torch.randint(7, shape)
    labels[..., 2] = -100
    got, wanted = loss_core.causal_lm_loss(logits, labels), shifted(logits, labels)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss, logits)[0] for loss in (got, wanted)), atol=1e-12, rtol=1e-12
    )


def test_micro_batches_add_up_to_the_batch():
    """A mean of means would weight five tokens like five hundred."""
    short, long = torch.randn(1, 6, 11, dtype=torch.float64), torch.randn(1, 501, 11, dtype=torch.float64)
    labels = torch.randint(11, (1, 6)), torch.randint(11, (1, 501))
    items = 505
    parts = [
        loss_core.causal_lm_loss(logits, of, num_items_in_batch=items)
        for logits, of in zip((short, long), labels, strict=True)
    ]
    whole = sum(shifted(logits, of, reduction="sum") for logits, of in zip((short, long), labels, strict=True)) / items
    torch.testing.assert_close(sum(parts), whole, atol=1e-12, rtol=1e-12)
    means = [loss_core.causal_lm_loss(logits, of) for logits, of in zip((short, long), labels, strict=True)]
    assert abs(sum(means) / 2 - whole) > 1e-4


@pytest.mark.parametrize("items", [505, 505.0, torch.tensor(505), torch.tensor([505.0]), torch.tensor(505.0).double()])
def test_num_items_may_be_any_number(items):
    logits, labels = torch.randn(1, 6, 11), torch.randint(11, (1, 6))
    wanted = shifted(logits, labels, reduction="sum") / 505
    torch.testing.assert_close(loss_core.causal_lm_loss(logits, labels, num_items_in_batch=items), wanted)
    torch.testing.assert_close(loss_core.causal_lm_loss(logits, labels, num_items=items), wanted)


def test_a_model_may_call_it_as_its_loss_function():
    """The call that Hugging Face models make, keyword arguments of their layers included."""
    logits, labels = torch.randn(1, 6, 11), torch.randint(11, (1, 6))
    loss = loss_core.causal_lm_loss(
        logits=logits, labels=labels, vocab_size=11, num_items_in_batch=None, cu_seq_lens_q=None, max_length_q=6
    )
    torch.testing.assert_close(loss, shifted(logits, labels))
    torch.testing.assert_close(loss_core.causal_lm_loss(logits, labels, 11, 7.0, -100), shifted(logits, labels) * 5 / 7)


def test_bytes_are_shifted_with_their_labels():
    logits, labels = torch.randn(1, 4, 5), torch.tensor([[0, 1, -100, 3]])
    lengths = torch.tensor([[100, 2, 50, 4]])
    got = loss_core.causal_lm_loss(logits, labels, reduction="byte_mean", byte_lengths=lengths)
    torch.testing.assert_close(got, shifted(logits, labels, reduction="sum") / (2 + 4))


def test_one_token_has_nothing_to_predict():
    logits = torch.randn(2, 1, 5, requires_grad=True)
    loss = loss_core.causal_lm_loss(logits, torch.zeros(2, 1, dtype=torch.int64), reduction="sum")
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()
    assert loss_core.causal_lm_loss(torch.randn(2, 0, 5), torch.zeros(2, 0, dtype=torch.int64), reduction="sum") == 0


def test_labels_on_another_device_are_moved():
    logits, labels = torch.randn(1, 4, 5, device="meta"), torch.zeros(1, 4, dtype=torch.int64)
    assert loss_core.causal_lm_loss(logits, labels, backend="torch").device.type == "meta"


class Elsewhere(TorchFunctionMode):
    """Lets CPU tensors pass for those of another device, and notes what is sent to the CPU without waiting."""

    def __init__(self, *elsewhere):
        super().__init__()
        self.elsewhere, self.sent = elsewhere, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.device.__get__ and any(args[0] is tensor for tensor in self.elsewhere):
            return torch.device("cuda", 0)
        if func is torch.Tensor.to:
            self.sent.append((kwargs or {}).get("non_blocking", False))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("moved", ["labels", "shift_labels", "num_items"])
def test_what_goes_from_a_gpu_to_logits_on_a_cpu_has_arrived_before_it_is_read(moved):
    logits, labels, items = torch.randn(1, 6, 11), torch.randint(11, (1, 6)), torch.tensor([4.0])
    arguments = {"labels": labels, "num_items": items}
    if moved == "shift_labels":
        arguments = {"labels": None, "shift_labels": labels, "num_items": items}
    # What is detached and reshaped first is another tensor.
    items.detach = lambda: items
    items.reshape = lambda *shape: items
    with Elsewhere(items if moved == "num_items" else labels) as mode:
        loss = loss_core.causal_lm_loss(logits, **arguments, backend="torch")
    assert mode.sent
    assert not any(mode.sent)
    shift = 0 if moved == "shift_labels" else 1
    pairs = logits[0, : 6 - shift], labels[0, shift:]
    torch.testing.assert_close(loss, functional.cross_entropy(*pairs, reduction="sum") / 4)
