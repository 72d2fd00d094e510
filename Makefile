# Everything happens in .venv, which is made on first use and again when requirements change.
# Another Python: `make test PYTHON=python3.12`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c requirements/constraints.txt

# Where a ROS distribution is sourced, its rclpy is seen through the venv and never shadowed;
# elsewhere wheels of PyPI stand in for it.
ROS_SOURCED := $(shell test -n "$$ROS_DISTRO" && $(PYTHON) -c 'import rclpy' 2>/dev/null && echo yes)
REQUIREMENTS := requirements/run.txt requirements/train.txt requirements/dev.txt
ifeq ($(ROS_SOURCED),yes)
KIND := $(ROS_DISTRO)
VENV_OPTIONS := --system-site-packages
else
KIND := wheels
REQUIREMENTS += requirements/ros.txt
export AMENT_PREFIX_PATH := $(CURDIR)/$(VENV)
endif
KIND := $(shell $(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])')-$(KIND)
READY := $(VENV)/ready-$(KIND)

ifndef TOPIC  # a running robot has settings of its own
# Nothing that is run here should meet the robots of the neighbours.
export ROS_AUTOMATIC_DISCOVERY_RANGE ?= LOCALHOST
# Without it Fast DDS loses many of the large messages even on one machine.
export FASTRTPS_DEFAULT_PROFILES_FILE ?= $(CURDIR)/config/fastdds.xml
export FASTDDS_DEFAULT_PROFILES_FILE ?= $(FASTRTPS_DEFAULT_PROFILES_FILE)
endif

.PHONY: help run test lint bench clean
.DEFAULT_GOAL := help

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' Makefile

# make run SOURCE=film.mp4, a folder, a bag or webcam; or TOPIC=/camera/image_raw of a running robot.
run: $(READY)  ## a camera and the keypoint node, with a live page; SOURCE=film.mp4, TOPIC=/image
	@$(BIN)/python -m kp2d_ros.run $(if $(SOURCE),--source '$(SOURCE)') $(if $(TOPIC),--topic '$(TOPIC)') $(ARGS)

test: $(READY)  ## run every test
	$(BIN)/python -m pytest -q $(ARGS)

lint: $(READY)  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)  ## measure the speed of every runtime of this machine
	$(BIN)/kp2d bench $(ARGS)

clean:  ## remove everything that was made here, the environment too
	rm -rf $(VENV) build install log dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A venv of another Python, or of another ROS, is made anew.
$(READY): $(REQUIREMENTS) requirements/constraints.txt setup.py
	@for other in $(VENV)/ready-*; do \
	    case $$other in $@|*'*') ;; *) echo "replacing $$other"; rm -rf $(VENV) ;; esac; done
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_OPTIONS) $(VENV)
	$(PIP) $(REQUIREMENTS:%=-r %)
	$(PIP) --no-deps --no-build-isolation --config-settings editable_mode=compat --editable .
	touch $@
