# SPDX-License-Identifier: Apache-2.0
#
# The front door. Meson builds (meson.build); this file sets up, and runs things.
# Everything that it makes lies in build/.

MESON := /usr/bin/meson
PYTHON := /usr/bin/python3
JOBS := $(shell nproc)

# Where the tree's Python packages are: the tree itself, the generated protocol and
# formats, the node's extension, and the client library, which Meson completes in
# the build directory with its extension; applications get that one alone. pyproject.toml has the same list for pytest.
export PYTHONPATH := $(CURDIR):$(CURDIR)/build/protocol:$(CURDIR)/build/formats:$(CURDIR)/build/appliance:$(CURDIR)/build/native/python
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/.pycache
export HYPOTHESIS_STORAGE_DIRECTORY := $(CURDIR)/build/.hypothesis

SOURCES := .ci appliance bench bpf coordinator counting ctl formats native packaging protocol runtime scripts systemd \
	testbed tests vagrant
PYTHON_SOURCES = $(shell { find $(SOURCES) -name '*.py'; grep -rlIE '^\#!.*python3?$$' $(SOURCES); } | sort -u)
SHELL_SOURCES = $(shell grep -rlIE '^\#!.*\<(ba)?sh$$' $(SOURCES) | sort)
C_SOURCES = $(shell find $(SOURCES) -name '*.[ch]' | sort)

LINT := build/venv-lint
NEWEST := build/venv-newest
LINT_STAMP := $(LINT)/.stamp

.DELETE_ON_ERROR:
.PHONY: help setup build deb rpm oci cluster test-packages build-asan build-tsan build-arm64 test test-all test-alone test-newest test-share \
	test-c test-python test-weak test-arm64 test-kernels test-fuzz fuzz-coverage fuzz-keep fuzz-python fuzz-python-coverage lint \
	lint-ruff lint-mypy lint-shell lint-clang-format lint-clang-tidy format \
	pythonpath demo demo-probes replay hostile hostile-peers mutants bench-native bench-http bench-plots bench-otel bench-probes bench-idle bench-decode bench-control bench-nodes bench-floor bench-shop clean

help:
	@echo 'sudo make setup       install the Debian packages that are missing'
	@echo 'sudo make demo        a shop of live services on three nodes, with trouble (DURATION= LATE= POOL= KEEP=1)'
	@echo 'sudo make demo-probes the same with kernel probes, and what breaks below it (ONLY= QUIET= KEEP=1)'
	@echo 'sudo make replay      replay recorded traffic on ten nodes (SPEED= FILE= LATE= POOL= KEEP=1)'
	@echo 'sudo make cluster     vagrant/ in containers that boot, from packages (NODES= KEEP=1)'
	@echo 'sudo make hostile-peers  hostile peers of a coordinator beside 30 honest nodes (DURATION= SPEED= ONLY=)'
	@echo 'sudo make hostile     hostile processes beside honest ones on two nodes (DURATION= SEED= ONLY=)'
	@echo 'sudo make test        set up, build, run the tests (15 minutes, once it is built)'
	@echo 'sudo make test-alone  the tests that have the machine to themselves: probes, packages, the demo'
	@echo 'sudo make test-all    both, and the tests that take longer'
	@echo 'sudo make test-share  ten minutes of those that take longer, others each time'
	@echo 'sudo make test-arm64  the C tests for arm64, emulated'
	@echo 'sudo make test-kernels  the probes on other kernels, under qemu'
	@echo 'sudo make test-weak   client and node on a weak memory, more executions of each scenario'
	@echo 'sudo make fuzz-python  libFuzzer on what Python reads of peers (FUZZ_S=)'
	@echo 'sudo make test-fuzz   libFuzzer on what clients and daemons say (FUZZ_S=)'
	@echo 'sudo make test-newest  the daemons on the newest releases of PyPI'
	@echo 'sudo make deb         the .deb into dist/, for Debian 12 or another release (SUITE=)'
	@echo 'sudo make rpm         the .rpm and their source into dist/, built on Debian (SUITE=)'
	@echo 'sudo make oci         images of containers into dist/oci/, of these (SUITE=)'
	@echo 'sudo make test-packages  install them on a plain Debian that is booted, use and purge them'
	@echo 'sudo make bench-otel  measure what tracing costs an OpenTelemetry application'
	@echo 'sudo make bench-probes  measure what kernel probes cost (PAIRS= LOADER= ONLY= QUICK=1)'
	@echo '     make bench-idle  measure what the daemons take where nothing happens (WINDOWS= WINDOW_S= CLIENTS=)'
	@echo '     make bench-decode  measure what it takes to read a trace (BASE=COMMIT: both in turn; ROUNDS=)'
	@echo '     make mutants     put deliberate defects in, and see that tests notice (ONLY=)'
	@echo '     make lint        style, types and static analysis of all sources'
	@echo '     make format      rewrite the sources in the style that lint wants'
	@echo '     make bench-control  measure the coordinator under a fleet of nodes (BASE=COMMIT: both in turn; ONLY= NODES= QUICK=1)'
	@echo 'sudo make bench-nodes  measure three nodes under an ordinary load (BASE=COMMIT: both in turn; ROUNDS= LOAD_S=)'
	@echo '     make bench-floor  measure the memory that Python and its libraries take of each daemon, import by import'
	@echo 'sudo make bench-shop  measure what watching a shop costs, beside a Collector with tail sampling (ROUNDS= LOAD_S= QUICK=1)'
	@echo '     make bench-native  measure the data path; results in build/bench/ (BASE=COMMIT: both in turn)'
	@echo '     make bench-http  measure two services that call each other over HTTP, traced and not'
	@echo '     make bench-plots  draw what bench-native and replay LATE= measured last, into docs/figures'
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

build/arm64/build.ninja: | setup
	$(configure) --cross-file native/arm64.ini

build: setup build/build.ninja
	ninja -C build -j$(JOBS)

build-asan: setup build/asan/build.ninja
	ninja -C build/asan -j$(JOBS)

build-tsan: setup build/tsan/build.ninja
	ninja -C build/tsan -j$(JOBS)

build-arm64: setup build/arm64/build.ninja
	ninja -C build/arm64 -j$(JOBS)

# The C tests as users run the code, then under ASan and UBSan, and those with
# several threads under TSan. TSan cannot lay out its shadow memory under the
# address randomisation of newer kernels, so it runs without.
MESON_TEST := $(MESON) test --no-rebuild --print-errorlogs --num-processes $(JOBS)
test-c: build build-asan build-tsan
	scripts/with-tmp $(MESON_TEST) -C build
	scripts/with-tmp $(MESON_TEST) -C build/asan
	TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 scripts/with-tmp \
		setarch --addr-no-randomize $(MESON_TEST) -C build/tsan --suite concurrent

# As in test-c, with up to 20,000 executions of each scenario where there are too many for every
# day, and those at random other ones each time. What fails is printed with what shows it again.
WEAK := doorbell grants handles inside litmus losses park run triggers
SEED := $(shell date +%s)
test-weak: build
	$(foreach name,$(WEAK),build/native/tests/weak/test_weak_$(name) --most 20000 --seed $(SEED) &&) true

# Emulated code is some four times as slow, and has no bpf().
test-arm64: build-arm64
	scripts/with-tmp env --unset=BACKSIGHT_REQUIRE_EBPF $(MESON_TEST) --timeout-multiplier 4 -C build/arm64

# The probes on Debian's cloud kernels, under qemu (KEEP=1).
test-kernels: build
	$(PYTHON) -m tests.kernels

# libFuzzer, for so many seconds each, at the same time, from what it found before (tests/data/fuzz).
FUZZ_S := 30
FUZZERS := attach directory slice spans
fuzz_bytes_slice := -max_len=6000
fuzz_bytes_spans := -max_len=4000
fuzz = build/native/tests/fuzz/fuzz_$(1) $(or $(fuzz_bytes_$(1)),-max_len=800) -len_control=20 -rss_limit_mb=1024 \
	-artifact_prefix=build/fuzz/$(1)-

build/fuzz/%: tests/data/fuzz/%.hex
	$(PYTHON) native/tests/fuzz/corpus.py unpack $< $@

test-fuzz: build $(FUZZERS:%=build/fuzz/%)
	ninja -C build fuzz
	$(MAKE) --jobs=$(JOBS) --output-sync=target $(FUZZERS:%=run-fuzz-%)

run-fuzz-%:
	$(call fuzz,$*) -max_total_time=$(FUZZ_S) -print_final_stats=1 build/fuzz/$*

# How much of what is fuzzed the kept inputs reach: lines and branches, by file.
fuzz-coverage: build $(FUZZERS:%=build/fuzz/%)
	ninja -C build reach
	for name in $(FUZZERS); do \
		program=build/native/tests/fuzz/reach_$$name; profile=build/fuzz/$$name.prof; \
		LLVM_PROFILE_FILE=$$profile.raw $$program -runs=0 build/fuzz/$$name && \
		llvm-profdata merge -o $$profile $$profile.raw && \
		llvm-cov report $$program -instr-profile=$$profile \
			-ignore-filename-regex='native/tests|/usr' || exit 1; \
	done

# Keep what was found: the fewest inputs that reach as much.
fuzz-keep: build $(FUZZERS:%=build/fuzz/%)
	ninja -C build fuzz
	for name in $(FUZZERS); do \
		rm -rf build/fuzz/kept && mkdir -p build/fuzz/kept && \
		build/native/tests/fuzz/fuzz_$$name -merge=1 build/fuzz/kept build/fuzz/$$name && \
		$(PYTHON) native/tests/fuzz/corpus.py pack build/fuzz/kept tests/data/fuzz/$$name.hex || exit 1; \
	done

# The same of what Python reads: control messages, questions, parameters of HTTP. Not in `test`: atheris
# is not in Debian. What it finds stays in build/fuzz-python.
PYTHON_FUZZERS := coordinator node questions http
FUZZ_VENV := build/venv-fuzz
FUZZ_PYTHON = scripts/with-tmp $(CURDIR)/$(FUZZ_VENV)/bin/python3 -m tests.fuzz
$(FUZZ_VENV)/stamp: tests/fuzz/requirements.txt
	$(PYTHON) -m venv --system-site-packages $(FUZZ_VENV)
	$(FUZZ_VENV)/bin/pip install --quiet --requirement $<
	touch $@

fuzz-python: build $(FUZZ_VENV)/stamp
	for name in $(PYTHON_FUZZERS); do $(FUZZ_PYTHON) seeds $$name build/fuzz-python/$$name || exit 1; done
	$(MAKE) --jobs=$(JOBS) --output-sync=target $(PYTHON_FUZZERS:%=run-fuzz-python-%)

run-fuzz-python-%:
	$(FUZZ_PYTHON) $* -max_total_time=$(FUZZ_S) -max_len=4000 -len_control=20 -print_final_stats=1 \
		-artifact_prefix=build/fuzz-python/bad-$*- build/fuzz-python/$*

fuzz-python-coverage: build $(FUZZ_VENV)/stamp
	for name in $(PYTHON_FUZZERS); do $(FUZZ_PYTHON) cover $$name build/fuzz-python/$$name || exit 1; done

# What looks at the machine as a whole, or uses all of it, has it to itself. Of the others, a test
# that ends its process, since it hangs (tests/conftest.py), is tried once more in a new one; if that
# ends too, all are over.
PYTEST := scripts/with-tmp $(PYTHON) -m pytest
ALONE := $(addprefix tests/,demo hostile kernels machine mishaps monitoring packaging probes replay)
# Many wait for a daemon: one more than there are processors keeps these busy.
WORKERS := $(shell expr $(JOBS) + 1)
test-python: build
	scripts/with-tmp --memory $(PYTHON) -m pytest tests $(ALONE:%=--ignore=%) -m 'not slow' \
		--numprocesses $(WORKERS) --dist loadfile --max-worker-restart 1

test-alone: build
	$(PYTEST) $(ALONE) -m 'not slow'

test: test-c test-fuzz test-python

test-all: test-c test-fuzz test-weak test-arm64 test-python test-alone
	$(PYTEST) tests -m slow
	scripts/with-tmp $(PYTHON) -m tests.mutants

# Of the tests that `test` leaves out, others each time: none begins so many seconds after the first.
SHARE_S := 600
test-share: build
	$(PYTEST) tests -m 'slow and not campaign' -p tests.share --share-s $(SHARE_S)

# Built in a tree of the release, with nothing of this machine.
SUITE := bookworm
deb: setup
	packaging/build-deb dist $(SUITE)

rpm: setup
	packaging/build-rpm dist $(SUITE)

oci: deb
	packaging/oci/build dist $(SUITE)

# The cluster of vagrant/, in containers.
cluster: build deb
	SUITE=$(SUITE) scripts/with-tmp $(PYTHON) -m tests.packaging

test-packages: build
	$(PYTEST) tests/packaging

# Whether the tests notice what they are for. In a copy of the tree, with a build of its own.
mutants: setup
	scripts/with-tmp $(PYTHON) -m tests.mutants

# The daemons on what PyPI has today instead of on Debian's packages; the protocol
# is generated by a compiler of the same age. Benchmarks, mutants and what ends a test that hangs
# are no daemons, and PyPI has no bcc.
test-newest: build
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
		--requirement tests/newest-requirements.txt
	rm -rf build/newest
	mkdir -p build/newest
	$(NEWEST)/bin/python -m grpc_tools.protoc --proto_path=protocol --proto_path=formats \
		--python_out=build/newest --grpc_python_out=build/newest \
		$$(find protocol formats -name '*.proto')
	PYTHONPYCACHEPREFIX=$(CURDIR)/build/newest/.pycache \
		scripts/with-tmp --memory $(NEWEST)/bin/python -m pytest tests/unit tests/cluster tests/machine \
		--ignore-glob='*/test_bench_*.py' --ignore=tests/unit/test_mutants.py \
		--ignore=tests/unit/test_hangs.py \
		-m 'not slow' -k 'not [bcc]' -o pythonpath='. build/newest build/appliance build/formats build/native/python'

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
	@echo 'clang-tidy: some minutes; all that it says is in build/clang-tidy.log'
	@run-clang-tidy -p build -quiet -j $(JOBS) -extra-arg=-Wno-unknown-warning-option \
		'^$(CURDIR)/(bench|native|tests)/' >build/clang-tidy.log 2>&1 || \
		{ grep -A 3 'error:' build/clang-tidy.log; exit 1; }

format: $(LINT_STAMP)
	$(LINT)/bin/ruff check --fix-only $(PYTHON_SOURCES)
	$(LINT)/bin/ruff format $(PYTHON_SOURCES)
	clang-format -i $(C_SOURCES)

pythonpath:
	@echo '$(PYTHONPATH)'

# DURATION, SPEED, FILE, LATE, POOL, KEEP, QUIET, SEED and ONLY, given on the command line, reach the programs in their
# environment, as make does by itself.
demo: build
	scripts/with-tmp $(PYTHON) -m tests.demo

demo-probes: build
	scripts/with-tmp $(PYTHON) -m tests.mishaps

replay: build
	scripts/with-tmp $(PYTHON) -m tests.replay

hostile: build
	scripts/with-tmp $(PYTHON) -m tests.hostile

hostile-peers: build
	scripts/with-tmp $(PYTHON) -m tests.hostile_peers

bench-native: build
	scripts/with-tmp bench/run $(if $(BASE),--base '$(BASE)')

bench-http: build
	scripts/with-tmp bench/run --only http --output build/bench/http.jsonl $(if $(BASE),--base '$(BASE)')
	bench/run --table --output build/bench/http.jsonl

# What the kernel probes cost (PAIRS= LOADER=core|bcc ONLY= QUICK=1).
bench-probes: build
	scripts/with-tmp $(PYTHON) -m bench.probes

bench-idle: build
	scripts/with-tmp $(PYTHON) -m bench.idle

bench-decode: build
	scripts/with-tmp $(PYTHON) -m bench.decode

# The coordinator under a fleet of nodes (BASE=COMMIT ONLY= NODES= ROUNDS= QUICK=1).
bench-control: build
	scripts/with-tmp $(PYTHON) -m bench.control

# Three nodes under an ordinary load (BASE=COMMIT ROUNDS= LOAD_S= PER_S= WRONG_EVERY= SPANS=).
bench-nodes: build
	scripts/with-tmp $(PYTHON) -m bench.nodes

# What Python and its libraries take before the daemons do anything.
bench-floor: build
	scripts/with-tmp $(PYTHON) -m bench.floor

# Beside an OpenTelemetry Collector, which is built by Go (ROUNDS= LOAD_S= QUICK=1).
bench-shop: build
	scripts/with-tmp $(PYTHON) -m bench.shop

# From what was measured last, into docs/figures.
bench-plots: build
	$(PYTHON) -m bench.plots

bench-otel: build
	scripts/with-tmp bench/otel.py

clean:
	rm -rf build
