"""transformers models over mapped tensors answer as those that transformers itself loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pilotlight import weights

transformers: Any = None
"""Imported by the first test that runs: it takes seconds, which a run that has none of them does
without."""


@pytest.fixture(autouse=True)
def quiet() -> None:
    """No bars, no reports of what a head lacks."""
    global transformers
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A tiny one, saved as a classifier."""
    torch.manual_seed(1)
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=100,
        max_position_embeddings=40,
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A tiny one, tied, in several files, whose rotary frequencies are scaled and stand in no
    file."""
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.max_new_tokens = 3
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    return tmp_path


def is_mapped(tensor: torch.Tensor) -> bool:
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return line.rstrip().endswith(".safetensors")
    return False


def answers(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(
            torch.arange(12).reshape(2, 6), output_hidden_states=True
        ).hidden_states[-1]
    return out


@pytest.mark.parametrize("auto", ["AutoModelForMaskedLM", "BertForMaskedLM", "AutoModel"])
def test_a_bert_answers_the_same(bert: Path, auto: str) -> None:
    ours = weights.from_pretrained(getattr(transformers, auto), bert)
    plain = getattr(transformers, auto).from_pretrained(bert)
    assert type(ours) is type(plain)
    assert torch.equal(answers(ours), answers(plain))
    assert not ours.training
    assert (ours.name_or_path, ours.config.name_or_path) == (str(bert), str(bert))


def test_every_parameter_that_the_file_has_is_the_file(bert: Path) -> None:
    model = weights.from_pretrained(transformers.AutoModelForMaskedLM, bert)
    copied = [name for name, parameter in model.named_parameters() if not is_mapped(parameter)]
    assert set(copied) <= {"cls.predictions.bias"}  # transformers ties it by a copy of its own
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert model.bert.embeddings.position_ids.tolist() == [list(range(40))]


def test_what_the_file_lacks_is_made_as_transformers_makes_it(bert: Path) -> None:
    model = weights.from_pretrained(
        transformers.AutoModelForSequenceClassification, bert, num_labels=5
    )
    assert model.classifier.weight.shape == (5, 32)
    assert model.classifier.bias.abs().sum() == 0
    assert 0.001 < model.classifier.weight.std() < 0.1


def test_a_llama_in_several_files_answers_the_same_with_its_own_rotary_frequencies(
    llama: Path,
) -> None:
    ours = weights.from_pretrained(transformers.AutoModelForCausalLM, llama)
    plain = transformers.AutoModelForCausalLM.from_pretrained(llama)
    assert torch.equal(answers(ours), answers(plain))
    assert torch.equal(ours.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    assert ours.model.rotary_emb.inv_freq[0] == 1.0
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert all(is_mapped(parameter) for parameter in ours.parameters())


def test_a_llama_generates_the_same_by_its_saved_settings(llama: Path) -> None:
    ours = weights.from_pretrained(transformers.AutoModelForCausalLM, llama)
    plain = transformers.AutoModelForCausalLM.from_pretrained(llama)
    assert ours.generation_config.max_new_tokens == 3
    prompt = torch.tensor([[5, 6, 7]])
    assert torch.equal(
        ours.generate(prompt, do_sample=False), plain.generate(prompt, do_sample=False)
    )


def test_keywords_go_where_transformers_takes_them(llama: Path) -> None:
    model, info = weights.from_pretrained(
        transformers.AutoModelForCausalLM,
        llama,
        dtype=torch.bfloat16,
        attn_implementation="eager",
        use_cache=False,
        output_loading_info=True,
    )
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert model.config.use_cache is False
    assert not info["missing_keys"]
    with pytest.raises(ValueError, match="name one device with device="):
        weights.from_pretrained(transformers.AutoModel, llama, device_map="auto")


def test_a_configuration_of_ones_own_is_taken(bert: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(bert, num_hidden_layers=1)
    model = weights.from_pretrained(transformers.AutoModelForMaskedLM, bert, config=config)
    assert len(model.bert.encoder.layer) == 1


def test_no_thread_is_left_behind(bert: Path) -> None:
    import threading

    before = set(threading.enumerate())
    weights.from_pretrained(transformers.AutoModelForMaskedLM, bert)
    for thread in set(threading.enumerate()) - before:
        thread.join(30)  # transformers tells its loading threads to end, and does not wait for them
        assert not thread.is_alive(), thread
