#!/bin/sh
# Other people's clients against our server: each is installed into a virtual environment of its own and run.
#   tests/clients/run.sh [FOLDER]     FOLDER keeps the environments; without it they are made anew and removed
# The packages come from the index that pip is set up for; the server and the clients only use loopback.
set -eu
cd "$(dirname "$0")/../.."
here=tests/clients
if [ $# -gt 0 ]; then home=$1; mkdir -p "$home"; remove=; else home=$(mktemp -d); remove=$home; fi
python=${PYTHON:-python}

$python -m app serve --port "${PORT:-0}" --api-key client-key >"$home/server.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true; [ -z "$remove" ] || rm -r "$remove"' EXIT
until url=$(grep -o 'ready at http://[^ ]*' "$home/server.log"); do kill -0 $server; sleep 0.3; done
url=${url#ready at }

failed=0
for name in openai langchain-openai instructor litellm llm; do
  env=$home/$name
  if [ ! -x "$env/bin/python" ]; then
    $python -m venv "$env"
    # litellm looks for mcp as soon as a request has tools, and does not ask for it itself
    more=; [ "$name" != litellm ] || more=mcp
    [ "$name" != openai ] || more=anthropic
    "$env/bin/pip" install -q --disable-pip-version-check "$name" $more
  fi
  script=$here/$(echo "$name" | tr - _)_client.py
  if "$env/bin/python" "$script" "$url/v1" client-key; then
    echo "ok      $("$env/bin/pip" freeze --disable-pip-version-check | grep -i "^$name==" )"
  else
    echo "FAILED  $name"; failed=1
  fi
done
exit $failed
