# Everything runs in .venv, made from the lock files. On a GPU machine install the extras instead: see README.md.
PYTHON ?= python3
PIP_ARGS ?=
# For two cores: tests also wait, for processes that start and deadlines that pass.
WORKERS ?= 3
# For some dozen tests: each worker imports the whole stack.
FEW ?= 2
BIN := .venv/bin
# A fifth of the modules are ever imported: Python compiles those as it imports them, and pip would compile all.
INSTALL = install -q --no-compile $(PIP_ARGS)
CPU := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=ERROR TORCH_CPP_LOG_LEVEL=ERROR TOKENIZERS_PARALLELISM=false
LAUNCH := --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no

.PHONY: help quickstart test test-slow test-gpu test-faults test-kills test-versions test-vision test-4bit test-adapters test-agents models lint types docs bench check clean

help:
	@echo "make quickstart   install, then train a small model with GRPO through vLLM; ARGS='--seed 1' passes flags"
	@echo "make test         install, then run the tests"
	@echo "make test-slow    larger worlds of the same tests; make test-faults, tools and ranks that hang and crash"
	@echo "make test-kills   a table of 60 runs on two ranks that are killed and started again, each against an undisturbed one"
	@echo "make test-gpu     on a GPU machine: whole user scripts on one, two and four GPUs, and docs/tested.md of them"
	@echo "make test-versions   tests of engine, packed rows and seam on the newest vLLM and transformers that are served"
	@echo "make test-vision  models that see images"
	@echo "make test-4bit    bases that bitsandbytes holds in 4 bits"
	@echo "make models       measure the weight paths of all architectures, and write docs/models.md of them"
	@echo "make test-adapters   OpenEnv and verifiers, in environments of their own"
	@echo "make test-agents     agents of three frameworks, as PyPI has them"
	@echo "make lint types docs bench check"

PLUGINS := vllm multiturn reshard ray trajectories training algorithms cure

.venv/run: requirements/cpu.lock pyproject.toml $(PLUGINS:%=plugins/trlx-hybrid-%/pyproject.toml)
	@echo "installing into .venv, which takes some minutes"
	$(PYTHON) -m venv .venv
	# torch with its dependencies first: where the plain wheel is a CUDA build it brings the libraries it needs.
	$(BIN)/pip $(INSTALL) "$$(grep '^torch==' requirements/cpu.lock)"
	$(BIN)/pip $(INSTALL) --no-deps hatchling==1.33.0 editables==0.6 pathspec==1.1.1 trove-classifiers==2026.9.21.13 packaging pluggy
	$(BIN)/pip $(INSTALL) --no-deps -r requirements/cpu.lock
	$(BIN)/pip install -q --no-deps --no-build-isolation -e . $(PLUGINS:%=-e plugins/trlx-hybrid-%)
	@touch $@

.venv/dev: .venv/run requirements/dev.lock
	$(BIN)/pip $(INSTALL) --no-deps -r requirements/dev.lock
	@touch $@

# The modules that every test process imports, compiled by one of them.
.venv/compiled: .venv/dev
	$(CPU) $(BIN)/python -W ignore -m trlx_hybrid.testing.preloaded
	@touch $@

# Packages of reasoning-gym have old code that Python warns of when it first compiles them.
quickstart: .venv/run
	@$(CPU) PYTHONWARNINGS=ignore::SyntaxWarning $(BIN)/accelerate launch $(LAUNCH) examples/quickstart.py $(ARGS)

test: .venv/compiled
	$(CPU) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-slow: .venv/compiled
	$(CPU) $(BIN)/python -m pytest -m slow -n $(WORKERS) --dist worksteal $(ARGS)

# On a GPU machine, in an environment where README's install ran: whole scripts, each on GPUs of its own.
GPUS ?= $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)
test-gpu: export TRLX_WHOLE_RUNS := $(CURDIR)/tests/whole_runs/results/$(shell date +%Y-%m-%d).jsonl
test-gpu:
	failed=0; for width in 1:one_gpu 2:two_gpus 4:four_gpus; do \
		$(PYTHON) -m pytest tests/whole_runs/test_$${width#*:}.py -n $$(( $(GPUS) / $${width%:*} )) $(ARGS) || failed=1; \
	done; $(PYTHON) tests/whole_runs/page.py; exit $$failed

models: .venv-vision/run
	$(CPU) .venv-vision/bin/python -m tests.models

test-faults: .venv/dev
	FAULT_SEEDS=20 $(CPU) $(BIN)/python -m pytest plugins/trlx-hybrid-multiturn/tests/test_faults.py $(ARGS)
	FAULT_SEEDS=50 $(CPU) $(BIN)/python -m pytest -m "slow or not slow" \
		$(patsubst %,plugins/trlx-hybrid-ray/tests/test_%.py,launch_faults remote_faults remote_engine_faults) $(ARGS)

# An hour on two cores: 60 runs on two ranks that are killed, stopped, or whose files and disks fail.
test-kills: .venv/dev
	$(CPU) $(BIN)/python -m tests.whole_runs.kills $(ARGS)

# Another environment, with what its lock file names, installed by the pip of .venv.
define ENVIRONMENT
$(PYTHON) -m venv --without-pip .venv-$*
echo '*' > .venv-$*/.gitignore
$(BIN)/pip --python .venv-$*/bin/python $(INSTALL) --no-deps -r $<
endef

# A few distributions in front of those that `make test` runs on. AT_START is run as Python starts.
.venv-newest/run .venv-vision/run .venv-4bit/run .venv-deepspeed/run: .venv-%/run: requirements/%.lock .venv/dev
	$(ENVIRONMENT)
	.venv-$*/bin/python -c 'import pathlib, sysconfig as of; \
		here, rest = (of.get_path("purelib", vars=dict(base=base)) for base in (".venv-$*", "$(CURDIR)/.venv")); \
		lines = f"import site; site.addsitedir({rest!r})", "$(AT_START)", ""; \
		pathlib.Path(here, "rest.pth").write_text("\n".join(lines))'
	@touch $@

# The newest versions that are served. On the oldest, the same tests are a part of `make test`.
test-versions: .venv-newest/run
	$(CPU) .venv-newest/bin/python -m pytest -n $(FEW) --dist worksteal $(ARGS) \
		$(patsubst %,plugins/trlx-hybrid-vllm/tests/test_%.py,engine bad_input scheduler lora_sync model_generate) \
		plugins/trlx-hybrid-training/tests/test_packed.py::test_packed_is_what_padded_is tests/test_trl_internals.py

# torchvision has no published build for CPUs: its operators are declared as Python starts, which is all that is needed.
.venv-vision/run: AT_START := import tests.support.torchvision_operators
.venv-vision/run: tests/support/torchvision_operators.py

# The longest first: at the end there is less to wait for. MKL sums in one order on all processors: by default the gap
# between trainer and engine of a Qwen3.5 is above its bound on some of them.
test-vision: .venv-vision/run
	$(CPU) MKL_CBWR=COMPATIBLE .venv-vision/bin/python -m pytest -n $(FEW) --dist worksteal -m "slow or not slow" $(ARGS) \
		'tests/whole_runs/test_on_a_cpu.py::test_episodes_are_recorded_and_replayed_and_sampled_without_training[gallery.py-pictures]' \
		plugins/trlx-hybrid-ray/tests/test_two_hosts.py::test_a_model_that_sees_images_is_served_by_one_engine_over_both \
		$(patsubst %,plugins/trlx-hybrid-%/tests/test_images.py,vllm reshard multiturn ray) \
		plugins/trlx-hybrid-training/tests/test_packed.py::test_a_model_that_takes_images_stays_padded \
		tests/whole_runs/test_on_a_cpu.py::test_pictures \
		tests/whole_runs/test_on_a_cpu.py::test_an_environment_that_shows_pictures tests/test_recipes.py::test_pictures \
		tests/test_examples.py::test_squares_are_counted tests/test_models.py::test_a_row_with_torchvision

test-4bit: .venv-4bit/run
	$(CPU) .venv-4bit/bin/python -m pytest -n $(FEW) --dist worksteal $(ARGS) \
		plugins/trlx-hybrid-vllm/tests/test_four_bits.py tests/whole_runs/test_on_a_cpu.py::test_a_base_in_4_bits \
		plugins/trlx-hybrid-training/tests/test_tiles.py::test_gradients_of_an_adapter_on_a_base_in_4_bits \
		plugins/trlx-hybrid-training/tests/test_long_rows.py::test_an_adapter_on_a_base_in_4_bits \
		$(patsubst %,tests/test_recipes.py::test_%,a_run_holds_what_was_forecast a_recipe_trains_a_tiny_model)

test-deepspeed: .venv-deepspeed/run
	$(CPU) .venv-deepspeed/bin/python -m pytest $(ARGS) \
		tests/whole_runs/test_on_a_cpu.py::test_zero3

# OpenEnv and verifiers ask for versions that clash with vLLM's: each has an environment of its own, without torch.
.venv-%/run: requirements/%.lock .venv/run
	$(ENVIRONMENT)
	@touch $@

test-adapters: .venv-openenv/run .venv-verifiers/run .venv/dev
	for name in openenv verifiers; do \
		PYTHONPATH=.:plugins/trlx-hybrid-multiturn/src .venv-$$name/bin/python -m pytest \
			plugins/trlx-hybrid-multiturn/tests/adapters $(ARGS) || exit 1; \
	done
	$(CPU) $(BIN)/python -m pytest -m slow plugins/trlx-hybrid-multiturn/tests/adapters $(ARGS)

# Beside the project's own packages, in a folder that only this test sees.
.venv-agents/run: requirements/agents.lock .venv/dev
	$(BIN)/pip $(INSTALL) --no-deps --target .venv-agents -r requirements/agents.lock
	@touch $@

test-agents: .venv-agents/run
	$(CPU) PYTHONPATH=.venv-agents $(BIN)/python -m pytest -m slow $(ARGS) \
		plugins/trlx-hybrid-multiturn/tests/gateway/test_frameworks.py

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.first_words trlx_hybrid plugins/*/src benchmarks examples

types: .venv/dev
	$(BIN)/mypy

docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: .venv/run
	$(CPU) $(BIN)/python -m benchmarks.host
	$(CPU) $(BIN)/python -m benchmarks.import_cost

check: .venv/run
	$(BIN)/python -m benchmarks check

clean:
	rm -rf .venv .venv-* build dist site runs
