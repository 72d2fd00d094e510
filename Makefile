# Everything runs in .venv, which is created on first use and updated when requirements change.
# Another Python: `make test PYTHON=python3.12`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c requirements/constraints.txt

# If a ROS distribution is sourced, the venv uses its rclpy. Otherwise wheels of PyPI replace it.
ROS_SOURCED := $(shell test -n "$$ROS_DISTRO" && $(PYTHON) -c 'import rclpy' 2>/dev/null && echo yes)
# `make run` needs neither torch nor pytest; all other targets need everything.
TO_RUN := requirements/run.txt
THE_REST := requirements/train.txt requirements/dev.txt
ifeq ($(ROS_SOURCED),yes)
KIND := $(ROS_DISTRO)
VENV_OPTIONS := --system-site-packages
else
KIND := wheels
TO_RUN += requirements/ros.txt
export AMENT_PREFIX_PATH := $(CURDIR)/$(VENV)
endif
KIND := $(shell $(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])')-$(KIND)
RUNS := $(VENV)/runs-$(KIND)
READY := $(VENV)/ready-$(KIND)

ifndef TOPIC  # a running robot has its own settings
# Do not connect to other robots in the network.
export ROS_AUTOMATIC_DISCOVERY_RANGE ?= LOCALHOST
# Without this, Fast DDS loses many large messages even on one machine.
export FASTRTPS_DEFAULT_PROFILES_FILE ?= $(CURDIR)/config/fastdds.xml
export FASTDDS_DEFAULT_PROFILES_FILE ?= $(FASTRTPS_DEFAULT_PROFILES_FILE)
endif

.PHONY: help run test test-robot fuzz lint bench ablation weights words clean
.DEFAULT_GOAL := help

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

# make run SOURCE=film.mp4, a folder, a bag or webcam; or TOPIC=/camera/image_raw of a running robot.
run: $(RUNS)  ## start a camera, the keypoint node and a live page; SOURCE=film.mp4, TOPIC=/image
	@$(BIN)/python -m kp2d_ros.demo.run $(if $(SOURCE),--source '$(SOURCE)') $(if $(TOPIC),--topic '$(TOPIC)') $(ARGS)

test: $(READY)  ## run every test
	$(BIN)/python -m pytest -q -n 2 --dist loadfile $(ARGS)

# `make test` runs a few fixed examples of these; SEED=7 selects others.
SEED ?= 0
fuzz: $(READY)  ## feed damaged files and extreme values for some minutes; SEED=7
	KP2D_FUZZ=20 $(BIN)/python -m pytest -q test/test_fuzz_*.py --timeout 1800 --hypothesis-seed=$(SEED) $(ARGS)

test-robot: $(READY)  ## install as the README says, with the versions of Ubuntu 24.04
	$(BIN)/python -m pytest -q test_robot --timeout 1800 $(ARGS)

lint: $(READY)  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## measure the speed of every runtime of this machine
	$(BIN)/kp2d bench $(ARGS)

# Ten runs of half an hour and more. If you stop it, the same command continues. More: ARGS=--strict
ifneq ($(filter ablation,$(MAKECMDGOALS)),)
$(if $(DATA),,$(error say what to train on: make ablation DATA=folder))
endif
ablation: $(READY)  ## train V0 to V4 of the paper at reduced scale, for hours; DATA=folder HPATCHES=folder
	$(BIN)/kp2d bench ablation --data '$(DATA)' $(if $(HPATCHES),--hpatches '$(HPATCHES)') $(ARGS)

# Trains the shipped models further: small views at a constant rate, then larger ones while it falls to 0.
# If you stop it, the same command continues. To start from scratch, remove runs/weights.
SMALL_STEPS ?= 30000 8000  # with small views, with large ones
FAST_STEPS ?= 16000 4000
BEGIN := --set optimizer.schedule=constant
BEGUN = --init $(1) --set pairs.strength='[[0, 1.0]]'
FINISH := --set pairs.strength='[[0, 1.0]]' --set pairs.mild_share='[[0, 0.4]]' --set pairs.width=320 --set pairs.height=240 \
    --set pairs.short_side='[240, 480]' --set pairs.strong.shift=48 --set optimizer.batch=3 \
    --set optimizer.learning_rate=0.0005 --set optimizer.kernel_rate=0.015 --set optimizer.warmup_steps=50
TAUGHT := --set loss.teacher=runs/weights/small/last.safetensors
train = $(BIN)/kp2d train --data '$(DATA)' --out runs/weights/$(1) \
    $(if $(wildcard runs/weights/$(1)/state.safetensors),--resume,--config $(2) --steps $(3))
after = --init runs/weights/$(1)/last.safetensors
ifneq ($(filter weights,$(MAKECMDGOALS)),)
$(if $(DATA),,$(error say what to train on: make weights DATA=folder))
endif
weights: $(READY)  ## train the shipped models, for hours; DATA=folder of photographs
	$(call train,small-begun,small,$(word 1,$(SMALL_STEPS)) $(BEGIN) $(call BEGUN,small))
	$(call train,small,small,$(word 2,$(SMALL_STEPS)) $(FINISH) $(call after,small-begun))
	$(call train,fast-begun,fast,$(word 1,$(FAST_STEPS)) $(BEGIN) $(call BEGUN,fast) $(TAUGHT))
	$(call train,fast,fast,$(word 2,$(FAST_STEPS)) $(FINISH) $(TAUGHT) $(call after,fast-begun))
	@echo 'runs/weights/small/last.safetensors and runs/weights/fast/last.safetensors: --model takes these files'

# Needed whenever the weights change: words belong to them.
ifneq ($(filter words,$(MAKECMDGOALS)),)
$(if $(DATA),,$(error say what to learn from: make words DATA=folder))
endif
words: $(READY)  ## learn the visual words of the shipped models, for minutes; DATA=folder of photographs
	for model in small fast half; do $(BIN)/kp2d train-words --model $$model --data '$(DATA)' \
	    -o kp2d_core/weights/$$model.words.safetensors || exit 1; done

clean:  ## remove all generated files and the environment
	rm -rf $(VENV) build install log dist out *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A venv of another Python, or of another ROS, is replaced.
$(RUNS): $(TO_RUN) requirements/constraints.txt setup.py
	@for other in $(VENV)/runs-*; do \
	    case $$other in $@|*'*') ;; *) echo "replacing $$other"; rm -rf $(VENV) ;; esac; done
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_OPTIONS) $(VENV)
	$(PIP) $(TO_RUN:%=-r %)
	$(PIP) --no-deps --no-build-isolation --config-settings editable_mode=compat --editable .
	touch $@

$(READY): $(RUNS) $(THE_REST)
	$(PIP) $(TO_RUN:%=-r %) $(THE_REST:%=-r %)
	touch $@
