"""BERT for pretraining (Devlin et al. 2019) on one device, without a padded token from embedding to head."""

from bert_mlperf.model.batch import Output, PackedBatch
from bert_mlperf.model.bert import BertForPreTraining
from bert_mlperf.model.shape import BertConfig, flops_per_step
from common.dropout import DropoutKey

__all__ = ["BertConfig", "BertForPreTraining", "DropoutKey", "Output", "PackedBatch", "flops_per_step"]
