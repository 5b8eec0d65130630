"""Our BERT against transformers' on padded input, and against itself under dropout, recompute and other batches."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from bert_mlperf.model import BertConfig, BertForPreTraining, DropoutKey, flops_per_step
from bert_mlperf.weights.names import take_apart
from common.recompute import SavedBytes

sys.path.append(str(Path(__file__).parent))
from bert_samples import TINY, make_batch, make_model

DROPPED = dataclasses.replace(TINY, dropout=0.1, attention_dropout=0.1)
KEY = DropoutKey(seed=3, step=7)


def theirs(model, dtype):
    transformers = pytest.importorskip("transformers")
    c = model.config
    config = transformers.BertConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden, num_hidden_layers=c.layers, num_attention_heads=c.heads,
        intermediate_size=c.ffn, max_position_embeddings=c.max_positions, layer_norm_eps=c.layer_norm_eps,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    reference = transformers.BertForPreTraining(config).to(dtype)
    tensors = {part.huggingface: tensor.detach() for part, tensor in take_apart(dict(model.named_parameters()), c)}
    missing, unexpected = reference.load_state_dict(tensors, strict=False)
    assert not unexpected and all("decoder" in name or "position_ids" in name for name in missing)
    reference.tie_weights()
    return reference


def padded(batch, width):
    n = len(batch.lengths)
    ids, segments, mask, labels = (torch.zeros(n, width, dtype=torch.long) for _ in range(4))
    labels.fill_(-100)
    for i, start in enumerate(batch.cu_seqlens[:-1].tolist()):
        k = batch.lengths[i]
        ids[i, :k], segments[i, :k], mask[i, :k] = (
            batch.input_ids[start : start + k],
            batch.segment_ids[start : start + k],
            1,
        )
        inside = (batch.masked_index >= start) & (batch.masked_index < start + k)
        labels[i, batch.masked_index[inside] - start] = batch.masked_labels[inside]
    return ids, segments, mask, labels


@pytest.mark.parametrize(
    ("config", "dtype", "tolerance"),
    [
        (TINY, torch.float64, 1e-10),
        (TINY, torch.float32, 1e-5),
        (BertConfig(layers=2, hidden=128, heads=2, ffn=512, dropout=0, attention_dropout=0), torch.float32, 1e-5),
    ],
)
def test_logits_losses_and_gradients_equal_transformers_on_padded_input(config, dtype, tolerance):
    model = make_model(config, dtype=dtype)
    if config is not TINY:
        model.initialize(0)
    reference = theirs(model, dtype)
    batch = make_batch(config, [40, 3, 17, 2, 29])
    ids, segments, mask, labels = padded(batch, 40)
    expected = reference(input_ids=ids, token_type_ids=segments, attention_mask=mask)
    x = model.encode(batch)
    logits = model.prediction.logits(x, model.embeddings.word.weight)
    torch.testing.assert_close(logits, expected.prediction_logits[mask.bool()], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(model.pool(x, batch), expected.seq_relationship_logits, rtol=tolerance, atol=tolerance)

    output = model(batch)
    cross_entropy = torch.nn.functional.cross_entropy
    mlm = cross_entropy(expected.prediction_logits.flatten(0, 1), labels.flatten(), reduction="sum")
    nsp = cross_entropy(expected.seq_relationship_logits, batch.next_sentence, reduction="sum")
    torch.testing.assert_close(output.mlm_loss_sum, mlm, rtol=tolerance, atol=0)
    torch.testing.assert_close(output.nsp_loss_sum, nsp, rtol=tolerance, atol=0)
    guessed = expected.prediction_logits.argmax(dim=-1)
    assert output.mlm_correct == (guessed == labels)[labels >= 0].sum()

    (output.mlm_loss_sum / 11 + output.nsp_loss_sum / 5).backward()
    (mlm / 11 + nsp / 5).backward()
    ours = {
        part.huggingface: grad for part, grad in take_apart({n: p.grad for n, p in model.named_parameters()}, config)
    }
    for name, parameter in reference.named_parameters():
        if "decoder" not in name:
            scale = parameter.grad.abs().max().item()
            torch.testing.assert_close(
                ours[name], parameter.grad, rtol=tolerance, atol=tolerance * max(scale, 1e-3), msg=name
            )


def gradients(model, batches, key=KEY):
    model.zero_grad()
    for batch in batches:
        output = model(batch, key)
        (output.mlm_loss_sum + output.nsp_loss_sum).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same(ours, expected, tolerance=1e-10):
    for name, grad in expected.items():
        torch.testing.assert_close(ours[name], grad, rtol=tolerance, atol=tolerance * grad.abs().max().item(), msg=name)


def split(batch, config):
    """The batch's samples as two batches, in another order."""
    parts = []
    for samples in ([2, 0], [3, 1]):
        tokens = torch.cat([torch.arange(batch.cu_seqlens[s], batch.cu_seqlens[s + 1]) for s in samples])
        place = torch.full((len(batch.input_ids),), -1)
        place[tokens] = torch.arange(len(tokens))
        kept = place[batch.masked_index] >= 0
        lengths = [batch.lengths[s] for s in samples]
        parts.append(
            dataclasses.replace(
                batch,
                input_ids=batch.input_ids[tokens],
                segment_ids=batch.segment_ids[tokens],
                position_ids=batch.position_ids[tokens],
                cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
                lengths=tuple(lengths),
                masked_index=place[batch.masked_index[kept]],
                masked_labels=batch.masked_labels[kept],
                next_sentence=batch.next_sentence[samples],
                sample_ids=batch.sample_ids[samples],
            )
        )
    return parts


@pytest.mark.parametrize("config", [TINY, DROPPED])
def test_gradients_do_not_depend_on_how_samples_are_batched(config):
    model = make_model(config)
    batch = make_batch(config, [9, 30, 2, 21])
    assert_same(gradients(model, split(batch, config)), gradients(model, [batch]))


def test_dropout_changes_with_step_seed_and_sample_and_is_off_in_evaluation():
    model = make_model(DROPPED)
    batch = make_batch(DROPPED, [9, 30])
    loss = lambda batch, key: model(batch, key).mlm_loss_sum.item()  # noqa: E731
    assert loss(batch, KEY) == loss(batch, KEY)
    moved = dataclasses.replace(batch, sample_ids=batch.sample_ids + 100)
    others = [loss(batch, DropoutKey(3, 8)), loss(batch, DropoutKey(4, 7)), loss(moved, KEY)]
    assert len({loss(batch, KEY), *others}) == 4
    model.eval()
    assert loss(batch, KEY) == loss(batch, None) == loss(moved, None)
    model.train()
    with pytest.raises(ValueError, match="pass DropoutKey"):
        model(batch)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_gives_the_same_gradients_and_keeps_less(recompute, offload):
    config = dataclasses.replace(DROPPED, recompute=recompute, offload=offload)
    expected, model = make_model(DROPPED), make_model(config)
    batch = make_batch(config, [9, 40, 2, 21])
    assert_same(gradients(model, [batch]), gradients(expected, [batch]), 1e-13)
    saved = {}
    for kind, candidate in (("none", expected), (recompute, model)):
        with SavedBytes(candidate.parameters()) as counter:
            candidate(batch, KEY)
        saved[kind] = counter.bytes
    # Attention under keyed dropout keeps only its inputs anyway, so there selective recompute has nothing left to save.
    assert saved[recompute] < {"full": 0.5, "selective": 1.001}[recompute] * saved["none"]


def test_selective_recompute_drops_what_the_attention_core_keeps():
    saved = {}
    for recompute in ("none", "selective", "full"):
        model = make_model(dataclasses.replace(TINY, recompute=recompute))
        with SavedBytes(model.parameters()) as counter:
            model(make_batch(TINY, [9, 40, 2, 21]))
        saved[recompute] = counter.bytes
    assert saved["full"] < saved["selective"] < saved["none"]


def test_keyed_attention_dropout_equals_the_plain_formula():
    from bert_mlperf.kernels import ragged_attention
    from common.dropout import keep_mask, token_keys

    torch.manual_seed(0)
    lengths, heads, d, p = (5, 9), 2, 4, 0.3
    qkv = torch.randn(14, 3, heads, d, dtype=torch.float64, requires_grad=True)
    keys = token_keys(KEY, torch.tensor([0] * 5 + [1] * 9), torch.cat([torch.arange(5), torch.arange(9)]))
    cu = torch.tensor([0, 5, 14], dtype=torch.int32)
    out = ragged_attention(qkv, lengths, cu, keys, 1, p)
    plain = []
    for part, part_keys in zip(qkv.split(lengths), keys.split(lengths), strict=True):
        q, k, v = part.permute(1, 2, 0, 3)
        n = len(part)
        mask = keep_mask(part_keys, 1, heads * n, p).view(n, heads, n).transpose(0, 1)
        weights = torch.softmax(q @ k.mT / d**0.5, dim=-1) * mask / (1 - p)
        plain.append((weights @ v).transpose(0, 1))
    expected = torch.cat(plain)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, qkv, grad)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(expected, qkv, grad)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", [[2], [1, 1], [40]])
def test_the_smallest_and_longest_sequences(lengths):
    model = make_model(DROPPED)
    batch = make_batch(DROPPED, [n if n > 1 else 2 for n in lengths])
    assert all(torch.isfinite(grad).all() for grad in gradients(model, [batch]).values())


def test_a_batch_without_masked_tokens_has_zero_loss_and_gradients():
    model = make_model()
    batch = make_batch(TINY, [5])
    batch.masked_index, batch.masked_labels = batch.masked_index[:0], batch.masked_labels[:0]
    output = model(batch)
    assert output.mlm_loss_sum == 0 and output.mlm_correct == 0
    output.mlm_loss_sum.backward()
    assert model.prediction.bias.grad.abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_full(dtype):
    batch = make_batch(DROPPED, [9, 30])
    expected = make_model(DROPPED, dtype=torch.float32)(batch, KEY)
    ours = make_model(DROPPED, dtype=dtype)(batch, KEY)
    assert ours.mlm_loss_sum.dtype == torch.float32
    torch.testing.assert_close(ours.mlm_loss_sum, expected.mlm_loss_sum, rtol=0.02, atol=0)


def test_initial_values_depend_on_seed_and_name_alone():
    a, b = BertForPreTraining(TINY), BertForPreTraining(TINY)
    a.initialize(1)
    torch.manual_seed(99)
    b.initialize(1)
    deeper = BertForPreTraining(dataclasses.replace(TINY, layers=3))
    deeper.initialize(1)
    for name, parameter in a.named_parameters():
        assert torch.equal(parameter, dict(b.named_parameters())[name])
        assert torch.equal(parameter, dict(deeper.named_parameters())[name])
    b.initialize(2)
    assert not torch.equal(a.pooler.weight, b.pooler.weight)


def test_flops_are_those_of_the_matrix_products():
    from torch.utils.flop_counter import FlopCounterMode

    config = BertConfig(layers=2, hidden=64, heads=4, ffn=128, vocab_size=500, dropout=0, attention_dropout=0)
    model = make_model(config, dtype=torch.float32)
    batch = make_batch(config, [30, 17])
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        output = model(batch)
        (output.mlm_loss_sum + output.nsp_loss_sum).backward()
    expected = flops_per_step(config, batch.lengths, len(batch.masked_index))
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)
