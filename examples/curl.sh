#!/bin/sh
# The gateway by curl: models, a chat, the same as a stream, and the course of a request.
set -eu
url="${DILASERVE_GATEWAY_URL:-http://127.0.0.1:8000}"
model="${DILASERVE_MODEL_NAME:-tiny}"
chat="{\"model\": \"$model\", \"messages\": [{\"role\": \"user\", \"content\": \"Running total of 3 5 2 7 1 8\"}]}"

post() {
    path="$1"
    body="$2"
    shift 2
    curl --fail-with-body --silent --show-error --header 'Content-Type: application/json' \
        --data "$body" "$@" "$url$path"
}

echo "--- models"
curl --fail-with-body --silent --show-error "$url/v1/models"
echo
echo "--- an answer in one piece, with the seed that was drawn"
post /v1/chat/completions "$chat" --dump-header - | sed 's/\r$//' | grep -iE '^x-|^\{'
echo
echo "--- a stream of text"
post /v1/chat/completions "${chat%\}}, \"stream\": true, \"stream_options\": {\"include_usage\": true}}" --no-buffer
echo "--- raw denoising steps: tokens appear out of order"
events="$(post /v1/denoise "$chat")"
printf '%s\n' "$events"
id="$(printf '%s\n' "$events" | sed -n 's/^id: \(.*\):0$/\1/p')"
echo "--- every step of that request: worker, epoch, threshold, latency"
curl --fail-with-body --silent --show-error "$url/v1/requests/$id"
echo
