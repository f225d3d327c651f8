# SPDX-License-Identifier: Apache-2.0
#
# The front door. Meson builds (meson.build); this file sets up, and runs things.
# Everything that it makes lies in build/.

MESON := /usr/bin/meson
PYTHON := /usr/bin/python3
JOBS := $(shell nproc)

# Where the tree's Python packages are: the tree itself, the generated protocol,
# and the client library, which Meson completes in the build directory with its
# extension. pyproject.toml has the same list for pytest.
export PYTHONPATH := $(CURDIR):$(CURDIR)/build/protocol:$(CURDIR)/build/native/python
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/.pycache
export HYPOTHESIS_STORAGE_DIRECTORY := $(CURDIR)/build/.hypothesis

SOURCES := .ci appliance bpf config coordinator ctl daemon export native packaging protocol scripts systemd tests vagrant
PYTHON_SOURCES = $(shell { find $(SOURCES) -name '*.py'; grep -rlIE '^\#!.*python3?$$' $(SOURCES); } | sort -u)
SHELL_SOURCES = $(shell grep -rlIE '^\#!.*\<(ba)?sh$$' $(SOURCES) | sort)
C_SOURCES = $(shell find $(SOURCES) -name '*.[ch]' | sort)

LINT := build/venv-lint
LINT_STAMP := $(LINT)/.stamp

.DELETE_ON_ERROR:
.PHONY: help setup build build-asan build-tsan test test-all test-c lint \
	lint-ruff lint-mypy lint-shell lint-clang-format lint-clang-tidy format \
	pythonpath replay bench-native clean

help:
	@echo 'sudo make replay      replay recorded traffic on ten nodes (SPEED= FILE= KEEP=1)'
	@echo 'sudo make test        set up, build, run the tests (15 minutes at most)'
	@echo 'sudo make test-all    the same, and the tests that take longer'
	@echo '     make lint        style, types and static analysis of all sources'
	@echo '     make format      rewrite the sources in the style that lint wants'
	@echo '     make bench-native  measure the data path; results in build/bench/'
	@echo '     make bench-otel  measure what tracing costs an OpenTelemetry application'
	@echo '     make build       build into build/'
	@echo '     make clean       remove build/'
	@echo 'Packages are installed by each of them where missing, which needs sudo.'

setup:
	@scripts/setup

# A configuration that was interrupted leaves what Meson takes for a whole one.
configure = rm -rf $(@D)/meson-private && $(MESON) setup $(@D)

build/build.ninja: | setup
	$(configure)

build/asan/build.ninja: | setup
	$(configure) -Db_sanitize=address,undefined

build/tsan/build.ninja: | setup
	$(configure) -Db_sanitize=thread

build: setup build/build.ninja
	ninja -C build -j$(JOBS)

build-asan: setup build/asan/build.ninja
	ninja -C build/asan -j$(JOBS)

build-tsan: setup build/tsan/build.ninja
	ninja -C build/tsan -j$(JOBS)

# The C tests as users run the code, then under ASan and UBSan, and those with
# several threads under TSan. TSan cannot lay out its shadow memory under the
# address randomisation of newer kernels, so it runs without.
MESON_TEST := $(MESON) test --no-rebuild --print-errorlogs --num-processes $(JOBS)
test-c: build build-asan build-tsan
	scripts/with-tmp $(MESON_TEST) -C build
	scripts/with-tmp $(MESON_TEST) -C build/asan
	TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 scripts/with-tmp \
		setarch --addr-no-randomize $(MESON_TEST) -C build/tsan --suite concurrent

test: test-c
	scripts/with-tmp $(PYTHON) -m pytest tests -m 'not slow'

test-all: test-c
	scripts/with-tmp $(PYTHON) -m pytest tests

$(LINT_STAMP): scripts/lint-requirements.txt | setup
	rm -rf $(LINT)
	$(PYTHON) -m venv --system-site-packages $(LINT)
	$(LINT)/bin/python -m pip install --quiet --disable-pip-version-check \
		--requirement scripts/lint-requirements.txt
	touch $@

# Apart, so that `make --keep-going lint` tells everything at once. clang-tidy
# leaves out what is generated, and since it runs on gcc's command lines it must
# not mind options of gcc's.
lint: lint-ruff lint-mypy lint-shell lint-clang-format lint-clang-tidy
	@echo 'lint: clean'

lint-ruff: $(LINT_STAMP)
	$(LINT)/bin/ruff check $(PYTHON_SOURCES)
	$(LINT)/bin/ruff format --check $(PYTHON_SOURCES)

lint-mypy: build $(LINT_STAMP)
	$(LINT)/bin/mypy $(PYTHON_SOURCES)

lint-shell: setup
	shellcheck $(SHELL_SOURCES)

lint-clang-format: setup
	clang-format --dry-run -Werror $(C_SOURCES)

lint-clang-tidy: build
	run-clang-tidy -p build -quiet -j $(JOBS) -extra-arg=-Wno-unknown-warning-option \
		'^$(CURDIR)/(native|tests)/'

format: $(LINT_STAMP)
	$(LINT)/bin/ruff check --fix-only $(PYTHON_SOURCES)
	$(LINT)/bin/ruff format $(PYTHON_SOURCES)
	clang-format -i $(C_SOURCES)

pythonpath:
	@echo '$(PYTHONPATH)'

# SPEED, FILE and KEEP, given on the command line, reach the programs in their
# environment, as make does by itself.
replay: build
	scripts/with-tmp $(PYTHON) -m tests.replay

bench-native: build
	scripts/with-tmp native/bench/run

bench-otel: build
	scripts/with-tmp native/bench/otel.py

clean:
	rm -rf build
