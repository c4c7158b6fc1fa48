// node-llama-cpp through the token generators of its context sequences; greedy sampling by its own sampler. The protocol is that of lines.py.
import {readFileSync} from "node:fs";
import {createRequire} from "node:module";
import path from "node:path";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const STREAMS = 32;
const ROOM = 640;

// The package lies in the working directory, not beside this file.
const found = createRequire(path.resolve("package.json")).resolve("node-llama-cpp");
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(found).href);

let model, sequences;

const take = async (streams) => {
    const results = await Promise.all(streams.map((stream) => stream.next()));
    if (results.some(({done}) => done))
        throw new Error("a sequence ended early");
    return results.map(({value}) => value);
};

const begin = async (prompts) => {
    const used = sequences.slice(0, prompts.length);
    await Promise.all(sequences.map((sequence) => sequence.clearHistory()));
    return used.map((sequence, i) => sequence.evaluate(prompts[i], {temperature: 0, yieldEogToken: true}));
};

const finish = (streams) => Promise.all(streams.map((stream) => stream.return()));

const seconds = () => performance.now() / 1000;

const engine = {
    version: () => JSON.parse(readFileSync("node_modules/node-llama-cpp/package.json")).version,

    prepare: ({model}) => model,

    async load({model: modelPath, threads}) {
        const llama = await getLlama({
            gpu: false, build: "never", skipDownload: true, progressLogs: false, maxThreads: threads,
            logLevel: LlamaLogLevel.warn, logger: (level, message) => console.error(level, message)
        });
        model = await llama.loadModel({modelPath});
        const context = await model.createContext({
            sequences: STREAMS, contextSize: ROOM, batchSize: 512, threads: {ideal: threads, min: threads}
        });
        sequences = Array.from({length: STREAMS}, () => context.getSequence());
        return null;
    },

    async complete({prompt, tokens}) {
        const ids = model.tokenize(prompt);
        const start = model.tokens.shouldPrependBosToken ? [model.tokens.bos] : [];
        const streams = await begin([[...start, ...ids]]);
        const said = [];
        while (said.length < tokens)
            said.push(...await take(streams));
        await finish(streams);
        return model.detokenize(said, false, ids);
    },

    async prefill({prompt}) {
        const streams = await begin([prompt]);
        const started = seconds();
        await take(streams);
        const spent = seconds() - started;
        await finish(streams);
        return spent;
    },

    async decode({prompts, steps}) {
        const streams = await begin(prompts);
        await take(streams);
        const started = seconds();
        for (let step = 0; step < steps; step++)
            await take(streams);
        const spent = seconds() - started;
        await finish(streams);
        return spent / steps;
    },

    close: () => null
};

for await (const line of createInterface({input: process.stdin})) {
    const {do: command, ...given} = JSON.parse(line);
    let answer;
    try {
        answer = {ok: await engine[command](given)};
    } catch (error) {
        console.error(error);
        answer = {error: String(error)};
    }
    process.stdout.write(JSON.stringify(answer) + "\n");
    if (command === "close")
        break;
}
process.exit(0);
