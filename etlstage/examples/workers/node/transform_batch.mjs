/*
 * Transform batches that the supervisor closes, in Node without dependencies.
 *
 * Messages that occur more than once in a batch are passed on once. As a T stage:
 * `command: [node, transform_batch.mjs]`.
 */

import { once } from "node:events";

// The batch may be empty. Buffers are compared by identity, so that the set
// is one of strings; as latin1 each byte is one character, and none is lost.
function transformBatch(messages) {
  const distinct = new Set(messages.map((message) => message.toString("latin1")));
  return [...distinct].map((text) => Buffer.from(text, "latin1"));
}

// A marker comes escaped as \ooo, so that even NUL can travel in the environment.
function marker(name, fallback) {
  const byte = (_, octal) => String.fromCharCode(parseInt(octal, 8));
  const text = process.env[name] ?? fallback;
  return Buffer.from(text.replace(/\\([0-7]{3})/g, byte), "latin1");
}

const EOM = marker("ETLSTAGE_EOM", "\\012");
const EOP = marker("ETLSTAGE_EOP", "\\000");
const EOB = marker("ETLSTAGE_EOB", "\\027");

// Stdout belongs to the protocol: console.error() only, never console.log().
let buffer = Buffer.alloc(0);
let batch = [];
let output = [];

function answer() {
  for (const reply of transformBatch(batch)) output.push(reply, EOM);
  output.push(EOP);
  batch = [];
}

for await (const chunk of process.stdin) {
  // A chunk may end anywhere, also within a marker.
  buffer = Buffer.concat([buffer, chunk]);
  let start = 0;
  for (;;) {
    // EOB stands where a message would begin, and no EOM follows it.
    if (buffer.subarray(start, start + EOB.length).equals(EOB)) {
      answer();
      start += EOB.length;
      continue;
    }
    const end = buffer.indexOf(EOM, start);
    if (end < 0) break;
    batch.push(buffer.subarray(start, end));
    start = end + EOM.length;
  }
  buffer = buffer.subarray(start);
  // Everything is written before the next chunk is awaited, and no more is read
  // while the supervisor is slower than we are.
  if (!process.stdout.write(Buffer.concat(output))) await once(process.stdout, "drain");
  output = [];
}
// The end of the input closes the last batch.
if (batch.length) answer();
// No process.exit(): it could cut off what is still being written.
process.stdout.write(Buffer.concat(output));
