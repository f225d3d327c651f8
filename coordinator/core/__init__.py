# SPDX-License-Identifier: Apache-2.0
"""The coordinator's decisions, without IO: events and a clock in, actions out.

coordinator  the facts and outputs
  lifecycle  a trace's way from trigger to oblivion
  closed     what is remembered of it after that
  nodes      who is connected; names, ids, refusals
  clock      how far each node's clock is off
  traversal  who is asked for which trace, who is told to drop it
  assembly   slices out of chunks
  credit     who may send how much
  trace      a trace, and each node's part in it
  evidence   what its slices say
  verdict    whether it is whole, and if not, why
  timers     what is due when
  config     times and bounds
  outbox     what is said and written, and what waits for durability
  snapshots  traces that are asked for by their age
  policy     what nodes are told to record
  figures    what is counted, and how things stand
  records    what is written, and read back at start
"""
