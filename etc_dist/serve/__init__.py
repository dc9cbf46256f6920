"""The command `etc-dist serve`: serves a model by OpenAI's HTTP interface.

serve_command.py   the command: its options, and what each rank does
jobs.py            messages between processes, and between ranks
channel.py         the connection of the engine's process and that of the HTTP server
engine.py          the main process of rank 0: which texts join and leave each step
stepper.py         the owner of the batch, on every rank
logprobs.py        the probabilities of tokens, from the logits of all ranks
front_process.py   the process of the HTTP server, as the engine's has it
front.py           what it does: a thread of it has the event loop
app.py             the routes, and their limits
clients.py         the jobs of the clients that are connected
request_fields.py  the fields of a request: honoured, neutral, or refused by name
answers.py         the JSON of answers
writer.py          the text of a job's ids, up to a stop string
metrics.py         counters for Prometheus

On rank 0, the main process steps the model, and another one has the HTTP server. A job
goes from it to the engine, which reports each turn. Other ranks make the same calls of
the batch."""
