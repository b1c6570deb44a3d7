#!/usr/bin/env bash
# Make the files of one generation, files/COMMIT, with the code of that commit: run this in an empty folder with that code
# installed. The second part was added for 1e93cc4. Afterwards folders that no test reads were removed (logs, pictures,
# TensorBoard files, checkpoints of finished runs), "run" was renamed "finished", and the absolute folder in
# shards/tokenize.json was replaced by /corpus. Of "carried", "ranks" and "adapters" the first checkpoint was kept, and the
# metrics of the finished run as NAME.jsonl; "interrupted" and "exported" are in the first generation only.
set -euo pipefail
mkdir texts
for number in 1 2 3 4 5 6; do
    for line in $(seq 1 30); do echo "text $number says line $line of the story about number $((number * line % 17))."; done > "texts/$number.txt"
done
small="model.num_layers=2 model.model_dim=16 model.key_dim=16 model.value_dim=32 model.num_heads=2 model.ffn_dim=32
    model.cema_modes=4 model.chunk_size=16 model.timestep_groups=4 batch_size=2 sequence_length=64 precision=float32
    evaluation.every=2 evaluation.rows=2 evaluation.final_rows=4 sample.tokens=8 threads=1 device=cpu data.source=texts/*.txt
    data.validation_fraction=0.3"

# A run of 8 steps, and the same run as if it had been killed after its checkpoint of step 4.
gecko train tiny $small steps=8 checkpoint.every=4 checkpoint.keep=2 --out run
gecko generate run --prompt "text 1" --seed 1 -n 24 > generated.txt
gecko generate run --prompt "text 1" --temperature 0 -n 24 > greedy.txt
cp -r run interrupted
rm -r interrupted/checkpoints/step-00000008 interrupted/report.html interrupted/tensorboard interrupted/results.json interrupted/sample.txt
python - <<'PYTHON'
from pathlib import Path
path = Path("interrupted/metrics.jsonl")
path.write_text("".join(line for line in path.open() if '"step": 8' not in line))
PYTHON

gecko tokenize 'texts/*.txt' --tokenizer bytes --workers 1 --out shards
gecko read run texts/1.txt texts/2.txt --out book.state
gecko read run texts/1.txt texts/2.txt --compact --out compact.state
gecko generate run --state book.state --prompt " In short" --temperature 0 -n 24 > continued.txt
gecko quantize run quantized
gecko generate quantized --prompt "text 1" --temperature 0 -n 24 > quantized.txt
python - <<'PYTHON'
import gecko
from gecko.hf import GeckoForCausalLM

model = gecko.load("run/checkpoints/step-00000008")
model.save("model")
GeckoForCausalLM.from_pretrained("model").save_pretrained("exported")
PYTHON

gecko eval perplexity run texts/1.txt --lengths 16,64 --out results/perplexity.json
gecko eval positions run texts/1.txt texts/2.txt --length 64 --out results/positions.json
gecko eval retrieval run passkey --lengths 1K --depths 0.5 --samples 2 --out results/retrieval.json

llama="model.num_layers=2 model.model_dim=16 model.num_heads=2 model.ffn_dim=32 batch_size=2 sequence_length=64 precision=float32"
compare="steps=4 evaluation.every=2 evaluation.rows=2 evaluation.final_rows=4 sample.tokens=0 threads=1 device=cpu data.source=texts/*.txt"
gecko train compare_llama $llama $compare data.validation_fraction=0.3 --out llama
rm -r run/report.html
gecko compare compare_gecko compare_no_memory model.num_layers=1 model.model_dim=16 model.key_dim=16 model.value_dim=16 model.ffn_dim=16 \
    model.num_heads=2 model.cema_modes=4 model.chunk_size=16 model.timestep_groups=4 batch_size=2 sequence_length=64 precision=float32 \
    $compare data.validation_fraction=0.3 --out compared

# Since 1e93cc4: every stored form of the weights, adapters, carried states, and a checkpoint of two ranks.
smaller="model.num_layers=1 model.model_dim=32 model.key_dim=32 model.value_dim=32 model.num_heads=2 model.ffn_dim=32 model.cema_modes=4
    model.chunk_size=16 model.timestep_groups=4 model.tie_embedding=true batch_size=2 sequence_length=64 precision=float32 threads=1
    evaluation.every=2 evaluation.rows=2 evaluation.final_rows=4 sample.tokens=0 device=cpu data.source=texts/*.txt data.validation_fraction=0.3"
gecko train tiny $smaller steps=8 checkpoint.every=4 checkpoint.keep=2 data.carry_state=true --out carried
torchrun --nproc_per_node=2 -m gecko train tiny $smaller steps=8 checkpoint.every=4 checkpoint.keep=2 --out ranks
gecko quantize carried int4 --bits 4
python - <<'PYTHON'
import torch
import gecko
from gecko.hf import GeckoForCausalLM, GeckoForSequenceClassification

model = gecko.load("carried/checkpoints/step-00000008")
model.save("tied")
model.bfloat16().save("bfloat16")
gecko.load("tied").half().save("float16")
GeckoForCausalLM.from_pretrained("tied").save_pretrained("sharded", max_shard_size=30_000)
torch.manual_seed(0)
GeckoForSequenceClassification.from_pretrained("tied", num_labels=3).save_pretrained("classifier")
PYTHON
for number in $(seq 1 8); do
    echo "{\"messages\": [{\"role\": \"user\", \"content\": \"text $number?\"}, {\"role\": \"assistant\", \"content\": \"story $number\"}]}"
done > chats.jsonl
cp carried/recipe.json tied
gecko finetune tied chats.jsonl --lora 2 steps=4 sequence_length=64 batch_size=2 checkpoint.every=2 checkpoint.keep=2 evaluation.every=2 sample.tokens=0 \
    precision=float32 threads=1 device=cpu --out adapters
python - <<'PYTHON'
import torch
from safetensors.torch import save_file

import gecko
from gecko.hf import GeckoForSequenceClassification

forms = ("tied", "bfloat16", "float16", "int4", "sharded", "adapters", "ranks")
tokens = torch.arange(97, 137)[None]
with torch.no_grad():
    logits = {form: gecko.load(form)(tokens)[0][0, -1].float() for form in forms}
    logits["classifier"] = GeckoForSequenceClassification.from_pretrained("classifier")(tokens).logits[0]
save_file(logits, "logits.safetensors")
PYTHON
