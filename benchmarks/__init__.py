"""Comparison of data-parallel wrappers on real data: the same step, interleaved, in one table.

From the inside out:

compiled_ddp/tools/comparison/   what measures, derives, draws and records, on any model (`compiled-ddp compare`)
workload.py   what is trained: a model from a module that is loaded anew per variant, its data, its optimizer
variants.py   rows of this project's own, beside those that anybody can compare
torch_rows.py, functional_all_reduces.py   rows of what torch itself offers beside DDP
functional_module.py   a functional step in the shape of a module
launch.py, link.py, worker.py   starting ranks: torch's elastic launcher, or two network namespaces and a shaped link
models.py, data.py, tasks.py    the workloads of this project; nothing above imports them
compare.py, train.py            the commands on whole steps
steps_by_size.py, passes_by_size.py, growth_chart.py, scaling.py   what size costs, and the command
compile_time.py                 what the passes add to Inductor's time for a backward
threads.py, perf_samples.py, cpu_rounds.py, cpu_time.py   where a step's CPU time goes, and the command
beside_jax.py, jax_gpt.py, step_rank.py   the GPT under JAX and under whole steps of ours: the command, and its ranks
gpu/                            all of it on a GPU, and what only a GPU shows: `make gpu`
kept.py                         what it costs to ask who still holds a gradient
publish.py, remeasure.py        fills the documents in from benchmarks/results/; measures these anew: `make results`
"""
