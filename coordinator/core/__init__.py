# SPDX-License-Identifier: Apache-2.0
"""The coordinator's decisions, without IO: events and a clock in, actions out.

coordinator  the facts and outputs; a trace's way from trigger to oblivion
  nodes      who is connected; names, ids, refusals
  clock      how far each node's clock is off
  traversal  who is asked for which trace, who is told to drop it
  assembly   slices out of chunks
  credit     who may send how much
  trace      a trace, and each node's part in it
  evidence   what its slices say
  verdict    whether it is whole, and if not, why
  timers     what is due when
  outbox     what is said and written, and what waits for durability
  records    what is written, and read back at start
"""
