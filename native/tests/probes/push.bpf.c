// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* Pushes triggers as probes do, when it is told to. */
#include "push.h"
#include "fire.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

SEC("syscall")
int push_some(struct push *order)
{
	const char name[32] = "kernel.test";
	__u32 process = 0;
	void *inner = bpf_map_lookup_elem(&processes, &process);
	struct shown shown = {.context = inner ? only(inner) : 0};
	struct bs_kernel_event event = {.kind = BS_KERNEL_RUN_QUEUE};
	struct laterals laterals = {.count = 1};

	if (!shown.context)
		return 0;
	shown.hi = order->producer;
	for (int i = 0; i < PUSH_AT_ONCE; i++) {
		shown.lo = order->next;
		event.time_ns = order->next;
		event.duration_ns = ~order->next;
		laterals.traces[0].hi = order->producer;
		laterals.traces[0].lo = ~order->next;
		if (!push(&shown, name, &event, &laterals))
			return 0;
		order->next++;
	}
	return 0;
}
